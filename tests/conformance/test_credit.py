"""Only the agent's own work is trained under the task's reward, and with the weights that did it."""

from __future__ import annotations

from pathlib import Path

import httpx

from tests.conformance.answers import begun, chat
from tests.conformance.engines import Engine
from tests.conformance.targets import NotOffered, Target
from tests.conformance.wanted import HI, TOOLS, Says, calling, ended, then

LONG_TEXT = "The tests are green, so the next thing is to read the other module. " * 5
TITLE = [
    {"role": "system", "content": "You are a title generator. You output only a thread title."},
    {"role": "user", "content": "Generate a title for this conversation: Begin."},
]
COMPACT = {"role": "user", "content": "Summarise the conversation so far: what was done, what is left to do."}


def trained(target: Target, says: Says, session: object) -> list[str]:
    """What is trained, as texts."""
    return [says.text(one) for row in target.rows(session) for one in row.completions]  # type: ignore[arg-type]


def needs_credit(target: Target) -> None:
    """Raises: the target trains nothing."""
    if target.name == "vllm":
        raise NotOffered("no record of a conversation")


def test_title_trained(target: Target, says: Says) -> None:
    needs_credit(target)
    says({"title generator": ["A fine beginning"], "": [calling({"cmd": "ls"}), "Done."]})
    session = target.session()
    chat(session, TITLE, stream=True)
    answer = chat(session, HI, tools=TOOLS)
    chat(session, [*HI, *then(answer.message)], tools=TOOLS)
    found = trained(target, says, session)
    assert ended("A fine beginning") not in found, "the title is trained"
    assert len(found) == 2, f"{len(found)} turns are trained instead of 2"


def test_quota_probe_trained(target: Target, says: Says) -> None:
    """Claude Code asks for one token to see whether it may; its work comes after."""
    needs_credit(target)
    says([calling({"cmd": "ls"}), "Done."])
    session = target.session()
    probe = {"model": session.model, "max_tokens": 1, "messages": [{"role": "user", "content": "quota"}]}
    sent = httpx.post(f"{session.url}/messages", json=probe, headers=session.headers, timeout=300, trust_env=False)
    assert sent.status_code == 200, f"HTTP {sent.status_code}"
    answer = chat(session, HI, tools=TOOLS)
    chat(session, [*HI, *then(answer.message)], tools=TOOLS)
    found = trained(target, says, session)
    assert len(found) == 2, f"{len(found)} turns are trained instead of 2"


def test_rejected_compaction_trained(target: Target, says: Says) -> None:
    """As OpenCode asks for a summary: the history without its tools. The agent then goes on with its old history."""
    needs_credit(target)
    says({"Summarise the conversation": ["In short: nothing."], "": [calling({"cmd": "ls"}), "Done."]})
    session = target.session()
    answer = chat(session, HI, tools=TOOLS)
    history = [*HI, *then(answer.message)]
    assert chat(session, [*history, COMPACT]).status == 200
    chat(session, history, tools=TOOLS)
    found = trained(target, says, session)
    assert ended("In short: nothing.") not in found, "the rejected summary is trained"
    assert len(found) == 2, f"{len(found)} turns are trained instead of 2"


def test_adapter_unloaded_while_in_use(target: Target, says: Says, engine: Engine, tmp_path: Path) -> None:
    says([LONG_TEXT])
    engine.slowly()
    folder = engine.adapter(tmp_path)
    first = target.publish(folder)
    session = target.session()
    named = {"model": first} if target.name == "vllm" else {}
    with begun(session, HI, stream=True, **named) as (answer, events):
        next(event for event in events if event["choices"][0]["delta"].get("content"))
        target.withdraw(first)
        second = target.publish(folder)
        assert second != first, "the newer version has the name of the older"
        for _ in events:
            continue
    assert answer.choice.content == LONG_TEXT, "the answer is not whole"
    assert answer.choice.finish_reason == "stop"
    target.withdraw(second)
