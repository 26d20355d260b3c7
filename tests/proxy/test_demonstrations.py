"""Sessions whose upstream is a teacher: what the agent gets, the tokens of the student's rows, what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from tests.gateway_process import GatewayProcess
from tests.proxy.conftest import Gate, StartFake, StartGateway
from turngate.proxy import wire
from turngate.proxy.client import GatewayError
from turngate.proxy.rerender import Rerenderer
from turngate.proxy.rows import build_rows
from turngate.proxy.store.reader import StoreReader
from turngate.proxy.turns import Turn, by_id
from turngate.proxy.verify import rerender_store, verify_store
from turngate.trainer.sft_rows import export_rows, read_rows

ASK = {"role": "user", "content": "How many files are here?"}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a command.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    }
]
SCRIPT = {
    "kind": "script",
    "turns": [
        {"tool_calls": [{"name": "bash", "arguments": {"command": "ls | wc -l  # <|im_end|>"}}]},
        {"content": "Three.\n"},
    ],
}


def drive(sdk: openai.OpenAI) -> list[str]:
    """A small agent: calls what it is told to call, until there is nothing; the texts it was given."""
    messages: list[Any] = [ASK]
    texts = []
    while True:
        message = sdk.chat.completions.create(model="policy", messages=messages, tools=TOOLS).choices[0].message
        texts.append(message.content or "")
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return texts
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in message.tool_calls]


def turns_of(gateway: GatewayProcess, rollout: str) -> list[Turn]:
    with StoreReader(gateway.store) as reader:
        return reader.turns(rollout)


def rendered(url: str, messages: list[Any], *, generation: bool) -> list[int]:
    body = {"messages": messages, "tools": TOOLS, "add_generation_prompt": generation}
    ids: list[int] = httpx.post(f"{url}/v1/chat/completions/render", json=body).json()["token_ids"]
    return ids


def test_a_script_is_played_and_the_rows_are_the_students_own_rendering(gate: Gate, tmp_path: Path) -> None:
    gateway = gate.says(["the policy is never asked"])
    created, sdk = gateway.session(training=False, upstream=SCRIPT)
    assert drive(sdk) == ["", "Three."]
    gateway.client.finish_rollout(created.id, wire.FinishRollout(reward=1.0))
    assert gate.fake.seen("/inference/v1/generate") == []
    first, second = turns_of(gateway, created.id)
    assert (first.kind, second.kind, first.mode, second.mode) == ("first", "spliced", "demonstration", "demonstration")
    (row,) = build_rows([first, second])
    answer = {**first.response, "content": ""}
    result = {"role": "tool", "tool_call_id": first.response["tool_calls"][0]["id"], "content": "3"}
    whole = rendered(gate.fake.url, [ASK, answer, result, dict(second.response)], generation=False)
    assert row.ids.tolist() == whole[: len(row.ids)]
    end = row.ids[-1]
    assert end not in whole[len(row.ids) :]
    before = len(rendered(gate.fake.url, [ASK], generation=True))
    after = len(rendered(gate.fake.url, [ASK, answer, result], generation=True))
    masked = np.zeros(len(row.ids), dtype=bool)
    masked[before : before + len(first.completion_ids)] = masked[after:] = True
    assert row.mask.tolist() == masked.tolist()
    assert first.completion_ids[-1] == second.completion_ids[-1] == end
    assert np.isnan(row.logprobs[row.mask]).all()
    assert (row.versions == -1).all()
    assert rerender_store(gateway.store, gate.fake.url).problems == []
    rows = read_rows(export_rows(gateway.store, "demonstration and reward >= 1", tmp_path / "rows.jsonl"), 8192).rows
    (learnt,) = [one for one in rows if one.rollout == created.id]
    assert list(learnt.ids) == row.ids.tolist(), "fine-tuning reads the same tokens"
    assert list(learnt.labels) == np.where(masked, row.ids, -100).tolist()


def test_a_streaming_agent_gets_the_same_answer_and_the_end_of_a_script_is_a_normal_answer(gate: Gate) -> None:
    gateway = gate.says(["never"])
    created, sdk = gateway.session(training=False, upstream=SCRIPT)
    chunks = list(sdk.chat.completions.create(model="policy", messages=[ASK], tools=TOOLS, stream=True))
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert [(call.function.name, call.function.arguments) for call in calls if call.function] == [
        ("bash", '{"command":"ls | wc -l  # <|im_end|>"}')
    ]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    said = [ASK, {"role": "assistant", "content": "a"}, ASK, {"role": "assistant", "content": "b"}, ASK]
    over = sdk.chat.completions.create(model="policy", messages=said, tools=TOOLS)
    assert "script" in (over.choices[0].message.content or "")
    assert len(turns_of(gateway, created.id)) == 1


def test_another_model_is_asked_with_a_key_from_the_environment_that_is_stored_nowhere(
    start_fake: StartFake, start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TEACHER_KEY", "sk-very-secret")
    teacher = start_fake([{"tool_calls": [{"name": "bash", "arguments": {"command": "ls"}}]}, "There are three."])
    student = start_fake(["never"])
    gateway = start_gateway(student.url)
    upstream = {"kind": "openai", "url": f"{teacher.url}/v1", "model": teacher.engine.settings.model}
    created, sdk = gateway.session(
        training=False, upstream={**upstream, "api_key_env": "TEACHER_KEY", "params": {"temperature": 0.5}}
    )
    assert drive(sdk) == ["", "There are three."]
    gateway.client.finish_rollout(created.id, wire.FinishRollout(reward=1.0))
    asked = teacher.seen("/v1/chat/completions")
    assert [len(body["messages"]) for body in asked] == [1, 3]
    assert asked[0]["tools"] == TOOLS
    assert asked[0]["temperature"] == 0.5
    gateway.stop()
    for path in [*gateway.store.iterdir(), gateway.log]:
        assert b"sk-very-secret" not in path.read_bytes(), path
    report = verify_store(gateway.store)
    assert (report.ok, report.demonstrated_turns, report.exact_rows) == (True, 2, 1)
    assert rerender_store(gateway.store, student.url).problems == []


def test_a_teacher_that_fails_makes_the_rollout_unscorable(gate: Gate) -> None:
    gateway = gate.says(["never"])
    nobody = {"kind": "openai", "url": "http://127.0.0.1:9/v1", "model": "gone", "timeout_s": 1}
    created, sdk = gateway.session(training=False, upstream=nobody)
    with pytest.raises(openai.InternalServerError, match="failed 3 times"):
        sdk.chat.completions.create(model="policy", messages=[ASK])
    done = gateway.client.finish_rollout(created.id, wire.FinishRollout(reward=1.0))
    assert (done.outcome, done.cause, done.reward) == ("unscorable", "teacher_fault", None)


def test_a_demonstration_cannot_be_opened_for_training(gate: Gate) -> None:
    script = wire.ScriptTeacher.model_validate(SCRIPT)
    new = wire.NewRollout.model_construct(task="test", training=True, upstream=script, group="g", group_size=2)
    with pytest.raises(GatewayError, match="training=false"):
        gate.gateway.client.create_rollout(new)


def test_verify_finds_a_demonstration_whose_tokens_are_not_the_rendering(gate: Gate) -> None:
    gateway = gate.says(["never"])
    created, sdk = gateway.session(training=False, upstream=SCRIPT)
    drive(sdk)
    first, second = turns_of(gateway, created.id)
    altered = second.completion_ids.copy()
    altered[0] += 1
    short = dataclasses.replace(second, completion_ids=second.completion_ids[:-1])
    for wrong, words in [
        (dataclasses.replace(second, completion_ids=altered), "does not render"),
        (short, "does not end"),
    ]:
        with Rerenderer(gate.fake.url, frozenset({int(second.completion_ids[-1])})) as again:
            again.check(by_id([first, wrong]), wrong)
        assert words in again.result.problems[0]
