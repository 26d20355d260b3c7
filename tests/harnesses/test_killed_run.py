"""A run whose runner is killed with SIGKILL goes on when it is started again, with real agents and the real gateway."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import FindModel
from tests.fake_engine.runner import FakeEngine
from tests.fake_engine.settings import FakeSettings, Fault
from tests.gateway_process import GatewayProcess
from tests.harnesses.conftest import StageMaker, TaskMaker
from turngate.harnesses.run import make_plan
from turngate.harnesses.runner import Runner

GENERATE = "/inference/v1/generate"


def lines(out: Path) -> list[dict[str, Any]]:
    """What the runner has written down."""
    file = out / "runner.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.harness
def test_a_killed_run_started_again_goes_on_and_repeats_nothing(
    serve: Callable[..., GatewayProcess], make_task: TaskMaker, tmp_path: Path
) -> None:
    gateway = serve(["It is so. " * 10], settings=FakeSettings(tokens_per_s=20.0))
    task = make_task("echo 1 > /logs/verifier/reward.txt")
    out = tmp_path / "out"
    command = [sys.executable, "-m", "turngate.proxy.cli", "run", f"gateway={gateway.url}", f"tasks={task.folder}"]
    command += [f"admin_key_file={gateway.store / 'admin.key'}", f"scratch={tmp_path / 'scratch'}", f"out={out}"]
    command += ["groups=2", "group_size=3", "concurrency=2", "harness_options.tools=false", "--json"]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 240
    while len(lines(out)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    while gateway.client.status().open_rollouts < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.wait()
    before = {line["id"] for line in lines(out)}
    assert before, "nothing was finished in time"
    assert gateway.client.status().open_rollouts > 0, "the kill was to leave sessions open"

    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    summary = json.loads(again.stdout.splitlines()[-1])
    assert (summary["rollouts"], summary["scored"], summary["groups"]) == (6, 6, 2)
    status = gateway.client.status()
    assert (status.open_rollouts, status.groups["ready"], status.scored_rollouts) == (0, 2, 6)
    told = lines(out)
    assert before <= {line["id"] for line in told}
    assert set(Counter((line["group"], line["index"]) for line in told).values()) == {1}

    third = subprocess.run(command, capture_output=True, text=True, check=False)
    assert json.loads(third.stdout.splitlines()[-1])["scored"] == 6
    assert len(lines(out)) == 6, "a run that is complete runs nothing"


@pytest.mark.harness
async def test_a_cancelled_rollout_is_cancelled_in_the_engine_too(
    model_dir: FindModel, make_stage: StageMaker, make_task: TaskMaker, tmp_path: Path
) -> None:
    folder, slow = model_dir("qwen-coder-0.5b"), FakeSettings(tokens_per_s=2.0)
    task = make_task("echo 1 > /logs/verifier/reward.txt")
    with (
        FakeEngine(folder, script=["slow " * 2000], settings=slow) as engine,
        GatewayProcess(engine.url, tmp_path / "store", "--tokenizer", str(folder)) as gateway,
    ):
        probes = len(engine.seen(GENERATE))
        stage = make_stage(gateway, group_size=2, groups=1, concurrency=2, harness_options={"tools": False})
        runner = Runner(stage, make_plan(stage.settings, [task]))
        running = asyncio.create_task(runner.run())
        while len(engine.seen(GENERATE)) < probes + 2:
            await asyncio.sleep(0.1)
        before = engine.engine.aborted
        runner.cancel()
        results = await running
        deadline = time.monotonic() + 60
        while engine.engine.aborted < before + 2 and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        assert engine.engine.aborted == before + 2
        assert {result.cause for result in results} == {"runner_stopped"}
        assert gateway.client.status().open_rollouts == 0


@pytest.mark.harness
async def test_what_an_oversampled_group_does_not_need_is_cancelled_in_the_engine_too(
    model_dir: FindModel, make_stage: StageMaker, make_task: TaskMaker, tmp_path: Path
) -> None:
    folder = model_dir("qwen-coder-0.5b")
    task = make_task("echo 1 > /logs/verifier/reward.txt")
    with (
        FakeEngine(folder, script=["It is so."]) as engine,
        GatewayProcess(engine.url, tmp_path / "store", "--tokenizer", str(folder)) as gateway,
    ):
        before = engine.engine.aborted
        engine.fail(Fault("stall", times=1))
        options = {"group_size": 1, "extra_rollouts": 1, "groups": 1, "concurrency": 2}
        stage = make_stage(gateway, **options, harness_options={"tools": False})
        results = await Runner(stage, make_plan(stage.settings, [task])).run()
        assert sorted((result.outcome, result.cause) for result in results) == [
            ("cancelled", "oversampled"),
            ("scored", None),
        ]
        deadline = time.monotonic() + 60
        while engine.engine.aborted < before + 1 and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        assert engine.engine.aborted == before + 1
        assert gateway.client.status().open_rollouts == 0
