"""Exactness seen from outside: rows rebuilt from the engine's raw bodies alone equal the rows handed to training."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.engines import RealEngine
from tests.gateway_process import GatewayProcess
from tests.proxy.conftest import StartFake, StartGateway
from tests.tap import SeenRow, Tap, in_this_form, rows_from
from turngate.proxy import wire
from turngate.proxy.verify import verify_store

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "bash", "description": "run", "parameters": {"type": "object"}}}
]


def converse(client: openai.OpenAI, text: str, turns: int, rng: random.Random, **body: Any) -> None:
    """A conversation as agents echo it: arguments written again, text trimmed; now and then history rewritten."""
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
    for _ in range(turns):
        if rng.random() < 0.5:
            message = client.chat.completions.create(model="m", messages=messages, **body).choices[0].message
            content, calls = message.content or "", [c.model_dump() for c in message.tool_calls or ()]
        else:
            content, calls = _streamed(client, messages, **body)
        echo: dict[str, Any] = {"role": "assistant", "content": content.strip() or None}
        if calls:
            echo["tool_calls"] = [{**call, "function": _again(call["function"])} for call in calls]
        messages.append(echo)
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": "done é"} for call in calls]
        if not calls:
            messages.append({"role": "user", "content": "Go on."})
        if rng.random() < 0.15:
            messages[1] = {"role": "user", "content": f"{text} (edited)"}


def _again(function: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"name": function["name"], "arguments": json.dumps(json.loads(function["arguments"]), sort_keys=True)}
    except json.JSONDecodeError:
        return function


def _streamed(client: openai.OpenAI, messages: list[Any], **body: Any) -> tuple[str, list[dict[str, Any]]]:
    content, calls = "", {}
    for event in client.chat.completions.create(model="m", messages=messages, stream=True, **body):
        for choice in event.choices:
            content += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                kept = calls.setdefault(
                    call.index, {"id": call.id, "type": "function", "function": {"name": "", "arguments": ""}}
                )
                kept["function"]["name"] += call.function.name or ""
                kept["function"]["arguments"] += call.function.arguments or ""
    return content, list(calls.values())


def leased_rows(gateway: GatewayProcess, group: str, created: list[wire.RolloutCreated]) -> dict[str, set[SeenRow]]:
    """Rows by rollout, as a trainer gets them, in the witness's form."""
    for i, one in enumerate(created):
        gateway.client.finish_rollout(one.id, wire.FinishRollout(reward=float(i)))
    (leased,) = gateway.client.lease(wire.NewLease(policy="policy")).groups
    assert leased.id == group
    rows = {}
    for rollout in leased.rollouts:
        unpacked = [row.unpack() for row in rollout.rows]
        rows[rollout.id] = {in_this_form(row.ids, row.mask, row.logprobs) for row in unpacked}
    return rows


def prove(gateway: GatewayProcess, tap: Tap, texts: list[str], turns: int, **body: Any) -> None:
    """Run one group of conversations, one after another, and compare both sides."""
    rng, created, witnessed = random.Random(7), [], {}
    for text in texts:
        before = len(tap.generations())
        one, client = gateway.session(group="g", group_size=len(texts))
        converse(client, text, turns, rng, **body)
        created.append(one)
        witnessed[one.id] = rows_from(tap.generations()[before:])
    handed = leased_rows(gateway, "g", created)
    assert handed == witnessed
    report = verify_store(gateway.store)
    assert report.problems == []
    assert report.rows == report.exact_rows == sum(len(rows) for rows in handed.values())


def test_rows_equal_what_crossed_the_wire_with_tools_and_rewrites(
    start_fake: StartFake, start_gateway: StartGateway
) -> None:
    script = [
        {"reasoning": "Hm.", "content": "Reading.", "tool_calls": [{"name": "bash", "arguments": '{"a":  1.50}'}]},
        "Plain text, no call.  ",
        {"tool_calls": [{"name": "bash", "arguments": '{"b": "}"}'}, {"name": "bash", "arguments": '{"c": 1e3}'}]},
        {"tool_calls": [{"name": "bash", "arguments": '{"broken": '}]},
    ]
    with Tap(start_fake(script).url) as tap:
        gateway = start_gateway(tap.url)
        prove(gateway, tap, [f"Task {i}" for i in range(4)], turns=6, tools=TOOLS)


@pytest.mark.engine
def test_rows_equal_what_crossed_the_wire_of_the_real_vllm(smollm_engine: RealEngine, tmp_path: Path) -> None:
    with Tap(smollm_engine.url) as tap, GatewayProcess(tap.url, tmp_path / "store") as gateway:
        prove(gateway, tap, ["Say a word.", "Name a colour."], turns=3, max_tokens=12)
