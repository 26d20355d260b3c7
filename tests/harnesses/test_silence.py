"""An engine that is silent for longer than a client waits: signs of life keep every client waiting, none asks again."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from tests.conftest import FindModel
from tests.fake_engine.runner import FakeEngine
from tests.fake_engine.settings import FakeSettings
from tests.gateway_process import GatewayProcess
from tests.harnesses.conftest import StageMaker, TaskMaker
from tests.harnesses.impatient import Impatient, impatience
from tests.harnesses.test_opencode import recorded
from turngate.harnesses.mini_swe_agent import FENCE, SUBMIT
from turngate.harnesses.rollout import Result, run_rollout
from turngate.tasks.harbor import Task

ONE = "echo 1 > /logs/verifier/reward.txt"
SUBMITTED = f"```{FENCE}\necho {SUBMIT}\n```"
"""mini-swe-agent's way to end, in text; the others take it for their last words."""

SUBMITTED_TOKENS = 18

SOME_AGENTS = ("pi", "opencode", "mini-swe-agent", "openhands", "codex", "gemini-cli")
EVERY_AGENT = (*SOME_AGENTS, "claude-code")


def signs(gateway: GatewayProcess) -> dict[str, int]:
    """How many turns a client left, and how many requests were another one's once more."""
    found = re.findall(r"^turngate_(cancelled|reattached)_total (\d+)$", httpx.get(f"{gateway.url}/metrics").text, re.M)
    return {name: int(count) for name, count in found if int(count)}


async def play(make_stage: StageMaker, gateway: GatewayProcess, task: Task, agent: str, idle_s: int) -> Result:
    """One rollout of an agent that waits for `idle_s` of silence."""
    limits = impatience(agent, idle_s)
    options = {"context_tokens": 32000, "tools": False, "extra_args": list(limits.args)}
    stage = make_stage(gateway, harness=agent, group_size=2, harness_options=options)
    return await run_rollout(replace(stage, harness=Impatient(stage.harness, limits)), task, agent)


async def play_all(
    model_dir: FindModel,
    store: Path,
    make_stage: StageMaker,
    make_task: TaskMaker,
    agents: Sequence[str],
    *,
    silent_s: float,
    idle_s: int,
    sign_s: float,
) -> None:
    """All agents at once, before an engine that is silent before its first token and before its last."""
    rate = SUBMITTED_TOKENS / silent_s  # all of the answer but its first token comes at once, after as long again
    settings = FakeSettings(latency_first_s=silent_s, tokens_per_s=rate, chunk_tokens=64, intervals=False)
    folder = model_dir("qwen-coder-0.5b")
    with (
        FakeEngine(folder, [SUBMITTED], settings=settings) as engine,
        GatewayProcess(engine.url, store, "--tokenizer", str(folder), "--keepalive-s", str(sign_s)) as gateway,
    ):
        task = make_task(ONE)
        results = await asyncio.gather(*(play(make_stage, gateway, task, agent, idle_s) for agent in agents))
        for agent, result in zip(agents, results, strict=True):
            assert (result.outcome, result.reward) == ("scored", 1.0), (agent, result.detail)
            assert len(recorded(gateway, result)) == 1, agent
        assert signs(gateway) == {}


@pytest.mark.harness
async def test_an_engine_silent_for_longer_than_agents_wait_is_waited_for(
    model_dir: FindModel, tmp_path: Path, make_stage: StageMaker, make_task: TaskMaker
) -> None:
    agents = SOME_AGENTS
    await play_all(model_dir, tmp_path / "store", make_stage, make_task, agents, silent_s=8.0, idle_s=5, sign_s=0.5)


@pytest.mark.harness
@pytest.mark.long
async def test_an_engine_silent_for_20_seconds_is_waited_for_where_agents_wait_for_12(
    model_dir: FindModel, tmp_path: Path, make_stage: StageMaker, make_task: TaskMaker
) -> None:
    agents = EVERY_AGENT
    await play_all(model_dir, tmp_path / "store", make_stage, make_task, agents, silent_s=20.0, idle_s=12, sign_s=5.0)


@pytest.mark.harness
@pytest.mark.long
@pytest.mark.parametrize("agent", ["pi", "opencode", "mini-swe-agent", "openhands"])
async def test_without_signs_of_life_that_silence_is_too_long_for_each_of_them(
    model_dir: FindModel, tmp_path: Path, make_stage: StageMaker, make_task: TaskMaker, agent: str
) -> None:
    folder = model_dir("qwen-coder-0.5b")
    settings = FakeSettings(latency_first_s=18.0, chunk_tokens=64, intervals=False)
    options = ("--tokenizer", str(folder), "--keepalive-s", "120", "--reattach-s", "0")
    with (
        FakeEngine(folder, [SUBMITTED], settings=settings) as engine,
        GatewayProcess(engine.url, tmp_path / "store", *options) as gateway,
    ):
        playing = asyncio.create_task(play(make_stage, gateway, make_task(ONE), agent, 12))
        while not playing.done() and not signs(gateway):
            await asyncio.sleep(0.5)
        playing.cancel()
        with suppress(asyncio.CancelledError):
            await playing
        assert signs(gateway)["cancelled"] > 0
