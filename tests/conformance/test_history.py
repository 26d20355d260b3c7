"""One conversation, one path: prefixes hold, retries do not fork, and what is no retry is not taken for one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.conformance.answers import Answer, Session, asked, begun, chat
from tests.conformance.engines import Engine
from tests.conformance.targets import NotOffered, Target
from tests.conformance.wanted import HI, TOOLS, Says, becomes, calling, ended, then

LONG_TEXT = "The tests are green, so the next thing is to read the other module. " * 5
RULES = "Work step by step and say what you do. Read before you write. " * 40
LAST = pytest.mark.parametrize("last", [False, True], ids=["in-the-middle", "last"])


def by_messages(session: Session, target: Target, turns: list[dict[str, Any]]) -> None:
    """A conversation in Anthropic's form, one request for each of `turns` (system and messages)."""
    for turn in turns:
        body = {"model": session.model, "max_tokens": 30, **turn}
        answer = httpx.post(f"{session.url}/messages", json=body, headers=session.headers, timeout=300, trust_env=False)
        assert answer.status_code == 200, f"HTTP {answer.status_code}: {answer.text[:200]}"
        turns[-1]["messages"][1]["content"] = answer.json()["content"]


def two_turns(system: Callable[[int], Any], user: Callable[[int, bool], Any]) -> list[dict[str, Any]]:
    """Two requests; the second has an answer between its messages, to be filled in."""
    first = [{"role": "user", "content": user(1, True)}]
    second = [
        {"role": "user", "content": user(1, False)},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": user(2, True)},
    ]
    return [{"system": system(1), "messages": first}, {"system": system(2), "messages": second}]


def test_billing_header_breaks_the_prefix(target: Target, says: Says) -> None:
    says(["Well.", "Done."])
    session = target.session()

    def system(turn: int) -> list[dict[str, Any]]:
        billing = f"x-anthropic-billing-header: cc_version=2.1.332.{turn}; cch={turn * 7919:05x};"
        return [{"type": "text", "text": billing}, {"type": "text", "text": RULES}]

    by_messages(session, target, two_turns(system, lambda turn, _: f"Step {turn}."))
    assert target.linked(session), "the second turn does not continue the first"


def test_moving_cache_marks_break_the_prefix(target: Target, says: Says) -> None:
    says(["Well.", "Done."])
    session = target.session()

    def user(turn: int, newest: bool) -> list[dict[str, Any]]:
        mark = {"cache_control": {"type": "ephemeral"}} if newest else {}
        return [{"type": "text", "text": f"Step {turn}.", **mark}]

    by_messages(session, target, two_turns(lambda _: [{"type": "text", "text": RULES}], user))
    assert target.linked(session), "the second turn does not continue the first"


@LAST
def test_sdk_retry_forks_the_trace(target: Target, says: Says, engine: Engine, last: bool) -> None:
    """The client's patience ends while the answer is being made; its SDK sends the same again."""
    needs_a_record(target)
    says(["One.", "Two."])
    session = target.session()
    engine.relay.hold()
    with asked(session, {"messages": HI, "max_tokens": 400, "stream": False}):
        assert becomes(lambda: engine.relay.open > 0), "the engine was never asked"
    with ThreadPoolExecutor(1) as pool:
        retried = pool.submit(chat, session, HI)
        threading.Event().wait(0.5)  # the retry is under way beside whatever is left of the first
        engine.relay.release()
        answer = retried.result()
    assert one_path(target, says, session, answer, last) == (["One."] if last else ["One.", "Two."])


@LAST
def test_streamed_turn_without_retry_protection(target: Target, says: Says, engine: Engine, last: bool) -> None:
    """The connection breaks after some of the stream; the agent sends the same again."""
    needs_a_record(target)
    says([LONG_TEXT, "Two."])
    engine.slowly()
    session = target.session()
    with begun(session, HI, stream=True) as (_, events):
        next(event for event in events if event["choices"][0]["delta"].get("content"))
    answer = chat(session, HI, stream=True)
    assert answer.choice.content == LONG_TEXT, "the retry did not bring the whole answer"
    assert one_path(target, says, session, answer, last) == ([LONG_TEXT] if last else [LONG_TEXT, "Two."])


def one_path(target: Target, says: Says, session: Session, answer: Answer, last: bool) -> list[str]:
    """What is trained of the session, which has one more turn unless the answer was its `last`."""
    if not last:
        chat(session, [*HI, *then(answer.message)])
    rows = target.rows(session)
    said = [says.text(one).removesuffix("<|im_end|>") for row in rows for one in row.completions]
    assert len(rows) == 1, f"{len(rows)} paths are trained; they say {said}"[:200]
    return said


def test_identical_body_taken_for_a_retry(target: Target, says: Says, engine: Engine) -> None:
    """A new sample is wanted after the first was delivered, and both were sampled: none is replayed or forgotten."""
    session = target.session()
    said = []
    for text in ("The one.", "The other."):
        says([text])
        said.append(chat(session, HI).choice.content)
    assert said == ["The one.", "The other."], "the first answer came twice"
    found = sorted(says.text(one) for row in target.rows(session) for one in row.completions)
    assert found == sorted(map(ended, said)), f"recorded is {found}"


def test_next_request_races_uncommitted_turn(target: Target, says: Says) -> None:
    """An agent may go on when it has seen the finish reason, before the stream is over."""
    needs_a_record(target)
    says([calling({"cmd": "a"}), calling({"cmd": "b"}), "Done."])
    session = target.session()
    messages = [*HI]
    for _ in range(2):
        with begun(session, messages, stream=True, tools=TOOLS) as (answer, events):
            next(event for event in events if event["choices"] and event["choices"][0].get("finish_reason"))
            messages += then(answer.message)
            with begun(session, messages, stream=True, tools=TOOLS) as (following, rest):
                list(rest)
        messages += then(following.message)
    rows = target.rows(session)
    assert [len(row.completions) for row in rows] == [4], f"{len(rows)} paths instead of one of 4 turns"


def needs_a_record(target: Target) -> None:
    """Raises: the target keeps no conversations."""
    if target.name == "vllm":
        raise NotOffered("no record of a conversation")
