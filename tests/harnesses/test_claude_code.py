"""Real Claude Code through a real gateway: odd tool calls, parallel calls, agents below agents, broken JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.gateway_process import GatewayProcess
from tests.harnesses.conftest import StageMaker, TaskMaker
from tests.harnesses.test_opencode import assert_each_token_is_trained_once, leased_rows, recorded
from turngate.harnesses.rollout import run_rollout

Serve = Callable[..., GatewayProcess]
ONE = "echo 1 > /logs/verifier/reward.txt"
OPTIONS = {"context_tokens": 32000}


def bash(arguments: Any) -> dict[str, Any]:
    """A scripted call of the shell; arguments as text are kept as they are written."""
    return {"name": "Bash", "arguments": arguments}


@pytest.mark.harness
async def test_six_turns_of_odd_calls_are_one_row_without_a_break(
    serve: Serve, make_stage: StageMaker, make_task: TaskMaker
) -> None:
    odd = '{ "timeout":1e4 ,  "description":"x", "command" : "echo h\\u00e9llo > a.txt" }'
    turns = [
        {"reasoning": "Hm.\n", "content": "  Look.\n", "tool_calls": [bash(odd)]},
        {"tool_calls": [bash('{"command": "sleep 1; echo one", "description": "x"}'), bash('{"command":"echo two"}')]},
        {"content": "Broken now.", "tool_calls": [bash('{"command": "ls", "description"')]},
        {"tool_calls": [{"name": "Nonsense", "arguments": '{"x":1.50}'}]},
        {"tool_calls": [bash('{"command": "cat a.txt"}')]},
        "All done.",
    ]
    gateway = serve(turns)
    stage = make_stage(gateway, harness="claude-code", group_size=2, history="append", harness_options=OPTIONS)
    task = make_task("grep -q héllo a.txt && " + ONE, prompts=('Say "it", -x $HOME.',))
    result = await run_rollout(stage, task, "group")
    found = recorded(gateway, result)
    assert (result.outcome, result.reward) == ("scored", 1.0), result.detail
    assert Counter(turn.label for turn in found) == {"main": 6}
    assert [turn.kind for turn in found] == ["first", *["spliced"] * 5], [turn.break_cause for turn in found]
    (row,) = leased_rows(gateway, result)
    assert_each_token_is_trained_once([row], found, {"main"})
