"""Real mini-swe-agent through a real gateway: with its tool, and as text in and text out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.gateway_process import GatewayProcess
from tests.harnesses.conftest import StageMaker, TaskMaker
from tests.harnesses.test_opencode import assert_each_token_is_trained_once, leased_rows, recorded
from turngate.harnesses.base import Output
from turngate.harnesses.mini_swe_agent import MiniSweAgent
from turngate.harnesses.rollout import run_rollout

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat a.txt"


def as_tool(command: str) -> dict[str, Any]:
    """A turn that calls its tool; spaces show that arguments come back verbatim."""
    return {"content": "Hm.", "tool_calls": [{"name": "bash", "arguments": f'{{ "command" :  "{command}" }}'}]}


def as_text(command: str) -> str:
    """A turn that writes a command down."""
    return f"THOUGHT: so.\n\n```mswea_bash_command\n{command}\n```"


@pytest.mark.harness
@pytest.mark.parametrize(("tools", "say"), [(True, as_tool), (False, as_text)])
async def test_a_solved_task_is_one_row_without_a_break(
    serve: Callable[..., GatewayProcess], make_stage: StageMaker, make_task: TaskMaker, tools: bool, say: Any
) -> None:
    gateway = serve([say("echo 42 > a.txt"), say(SUBMIT)])
    stage = make_stage(gateway, harness="mini-swe-agent", group_size=2, harness_options={"tools": tools})
    result = await run_rollout(stage, make_task("grep -x 42 answer.txt && echo 1 > /logs/verifier/reward.txt"), "g")
    assert (result.outcome, result.reward, result.notes["exit_status"]) == ("scored", 1.0, "Submitted"), result.detail
    status = gateway.client.status()
    assert (status.turns, status.spliced, status.breaks) == (2, 1, {})
    found = recorded(gateway, result)
    assert [turn.request.get("stream") for turn in found] == [None, None]
    assert bool(found[0].request.get("tools")) is tools
    assert_each_token_is_trained_once(leased_rows(gateway, result), found, {"main"})


def test_how_it_ended_decides_whether_it_is_scored() -> None:
    def told(status: str) -> Output:
        return Output(0, f'{{"exit_status": "{status}", "submission": "", "said": ["last words"], "turns": 3}}\n', "")

    repeated = MiniSweAgent().verdict(told("RepeatedFormatError"))
    assert (repeated.answer, repeated.fault) == ("last words", None)
    assert MiniSweAgent().verdict(told("LimitsExceeded")).fault == "harness_error"
    assert MiniSweAgent().verdict(Output(1, "", "Traceback")).fault == "harness_exit_1"
    assert MiniSweAgent().verdict(Output(0, "", "")).fault == "harness_error"
