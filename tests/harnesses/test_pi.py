"""Real pi, in its sandbox, through a real gateway: what it sends back must never break a history."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gateway_process import GatewayProcess
from tests.harnesses.conftest import StageMaker, TaskMaker
from turngate.harnesses.base import Endpoint, HarnessOptions, Output, Places
from turngate.harnesses.pi import Pi
from turngate.harnesses.rollout import run_rollout
from turngate.proxy import wire

ODD_TURNS = [
    {
        "content": "  Let me look around first.\n\n",
        "tool_calls": [{"name": "bash", "arguments": '{ "timeout":1e1 ,  "command" : "ls\\u0020-a" }'}],
    },
    {
        "content": "",
        "tool_calls": [
            {"name": "write", "arguments": '{"content":"h\\u00e9llo \\ud83d\\ude00 wörld\\n","path":"a.txt"}'},
            {"name": "bash", "arguments": '{"command": "echo \\"{\\\\\\"x\\\\\\": 1.50}\\" > b.json"}'},
        ],
    },
    {
        "content": "Now I read 日本語 and emoji 🎉:\t",
        "tool_calls": [
            {"name": "read", "arguments": '{"path":"a.txt"}'},
            {"name": "read", "arguments": '{"limit": 10.0, "path": "./b.json"}'},
        ],
    },
    {"tool_calls": [{"name": "bash", "arguments": '{"command":"cat a.txt | wc -c   \\n"}'}]},
    {
        "content": "\n\nEdit it.\n",
        "tool_calls": [
            {"name": "edit", "arguments": '{"path":"a.txt","edits":[{"oldText":"w\\u00f6rld","newText":"世界 </b>"}]}'}
        ],
    },
    "  Done: the file says héllo 😀 世界. \n",
]

CHECK = """#!/bin/bash
grep -q 'héllo 😀 世界 </b>' a.txt && grep -q x b.json && grep -q Done answer.txt || exit 1
echo 1 > /logs/verifier/reward.txt
"""


@pytest.mark.harness
@pytest.mark.parametrize("template", ["qwen", "drop-reasoning"])
async def test_six_turns_of_odd_tool_calls_are_one_row_without_a_break(
    serve: Callable[..., GatewayProcess], make_stage: StageMaker, make_task: TaskMaker, template: str
) -> None:
    gateway = serve(ODD_TURNS, template=template)
    stage = make_stage(gateway, group_size=2, harness_options={"context_tokens": 32768})
    task = make_task(CHECK)
    for _ in range(2):
        result = await run_rollout(stage, task, "group")
        assert (result.outcome, result.reward, result.cause) == ("scored", 1.0, None), result.detail
    status = gateway.client.status()
    assert (status.turns, status.spliced, status.breaks) == (12, 10, {})
    lease = gateway.client.lease(wire.NewLease(policy=status.policies[0].policy, max_groups=1))
    assert [[len(row.turns) for row in rollout.rows] for rollout in lease.groups[0].rollouts] == [[6], [6]]


@pytest.mark.harness
async def test_a_turn_cut_by_its_token_limit_stays_in_the_history_and_is_no_fault(
    serve: Callable[..., GatewayProcess], make_stage: StageMaker, make_task: TaskMaker
) -> None:
    gateway = serve(["one two three four five six seven eight nine ten eleven twelve"] * 3)
    options = {"tools": False, "system_prompt": "Be short.", "max_answer_tokens": 5}
    stage = make_stage(gateway, group_size=1, harness_options=options)
    task = make_task(
        "wc -w < answer.txt > /logs/verifier/reward.txt", prompts=("A?", "B?"), toml="reward_range = [0, 9]"
    )
    result = await run_rollout(stage, task, "group")
    assert (result.outcome, result.turns) == ("scored", 2), result.detail
    assert result.notes["answer_cut"] == 1
    status = gateway.client.status()
    assert (status.spliced, status.breaks) == (1, {})


def test_the_answer_is_what_pi_printed_without_its_own_newline() -> None:
    assert Pi().verdict(Output(0, "two\nlines \n", "")).answer == "two\nlines "


def test_status_one_is_a_fault_unless_the_last_turn_was_cut() -> None:
    assert Pi().verdict(Output(1, "", "500 status code")).fault == "harness_exit_1"
    assert Pi().verdict(Output(1, "half\n", "Response was truncated: …")).fault is None


def test_prompts_follow_the_end_of_options_so_that_a_dash_is_text() -> None:
    places = Places(*(Path(p) for p in ("/h", "/node", "/home", "/w")))  # type: ignore[arg-type]
    words = Pi().command(places, Endpoint("http://x/v1", "k", "m"), ["-first", "second"], HarnessOptions(tools=False))
    assert words[-3:] == ["--", "-first", "second"]
    assert "--no-tools" in words
