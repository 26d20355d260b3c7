"""A full context and a spent budget end the runs of agents that ask without end when they are told of it by a 400."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.fake_engine.settings import FakeSettings
from tests.gateway_process import GatewayProcess
from tests.harnesses.conftest import StageMaker, TaskMaker
from tests.harnesses.test_opencode import call, recorded
from turngate.harnesses.rollout import run_rollout

Serve = Callable[..., GatewayProcess]
ONE = "echo 1 > /logs/verifier/reward.txt"
SHELLS: dict[str, dict[str, Any]] = {
    "opencode": call("bash", {"command": "seq 1 3000", "description": "x"}),
    "openhands": call("terminal", {"command": "seq 1 3000", "security_risk": "LOW"}),
}
"""By agent: a call whose result is longer than the rest of the context."""

CONTEXT_TOKENS = 12000
"""More than the first prompt of either, less than two such results."""


def last_words(gateway: GatewayProcess) -> int:
    """How many requests were answered with the last words of a run."""
    found = re.findall(r"turngate_runs_ended_total\{.*\} (\d+)", httpx.get(f"{gateway.url}/metrics").text)
    return sum(map(int, found))


@pytest.mark.harness
@pytest.mark.parametrize("agent", list(SHELLS))
@pytest.mark.parametrize("cause", ["context_overflow", "budget:generated_tokens"])
async def test_agents_that_loop_on_a_400_end_within_three_further_requests_and_are_scored(
    serve: Serve, make_stage: StageMaker, make_task: TaskMaker, agent: str, cause: str
) -> None:
    budgets = {"max_generated_tokens": 10} if cause == "budget:generated_tokens" else {}
    gateway = serve([{"tool_calls": [SHELLS[agent]]}], settings=FakeSettings(max_model_len=CONTEXT_TOKENS))
    # As its users have it: it compacts by itself, and believes in a larger context than there is.
    options = {"context_tokens": 64000, "compaction": True}
    stage = make_stage(gateway, harness=agent, group_size=2, harness_options=options, budgets=budgets)
    result = await run_rollout(stage, make_task(ONE), "group")
    assert (result.outcome, result.reward) == ("scored", 1.0), result.detail
    assert gateway.client.rollout(result.id or "").metrics["flags"] == [cause]
    assert len(recorded(gateway, result)) == 1
    assert 1 <= last_words(gateway) <= 3
