"""Real pi in its sandbox can do the dataops tasks with its own tools: their steps, played turn by turn, earn 1."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gateway_process import GatewayProcess
from tests.harnesses.conftest import StageMaker
from tests.harnesses.played import PLAYED
from turngate.harnesses.base import HarnessOptions
from turngate.harnesses.pi import Pi
from turngate.harnesses.rollout import run_rollout
from turngate.tasks.dataops import write_set
from turngate.tasks.harbor import load_task
from turngate.tasks.steps import Step, load_steps

PI = Pi()


def turn(step: Step) -> Any:
    """The step as the fake engine's answer: a call of one of pi's tools, or the last words."""
    said = PI.play(step, HarnessOptions())
    calls = [{"name": call.name, "arguments": call.arguments} for call in said.tool_calls or ()]
    return {"tool_calls": calls} if calls else said.content


@pytest.mark.harness
async def test_pi_plays_solutions_of_every_level_and_tool_and_earns_1(
    serve: Callable[..., GatewayProcess], make_stage: StageMaker, tmp_path: Path
) -> None:
    write_set(tmp_path / "set")
    tasks = [load_task(tmp_path / "set" / name) for name in PLAYED]
    script = {task.prompts[0]: [turn(step) for step in load_steps(task.folder)] for task in tasks}
    gateway = serve(script)
    stage = make_stage(gateway, harness_options={"context_tokens": 32768})
    found = {}
    for task in tasks:
        result = await run_rollout(stage, task, task.name)
        found[task.name] = (result.outcome, result.reward, result.turns == len(load_steps(task.folder)), result.detail)
    assert found == dict.fromkeys(PLAYED, ("scored", 1.0, True, ""))
    status = gateway.client.status()
    assert status.breaks == {}


@pytest.mark.harness
async def test_pi_that_only_talks_earns_0(
    serve: Callable[..., GatewayProcess], make_stage: StageMaker, tmp_path: Path
) -> None:
    write_set(tmp_path / "set", "heldout-templates")
    task = load_task(tmp_path / "set" / "count-files-01")
    stage = make_stage(serve([task.prompts[0]]), harness_options={"context_tokens": 32768})
    result = await run_rollout(stage, task, "group")
    assert (result.outcome, result.reward) == ("scored", 0.0)
