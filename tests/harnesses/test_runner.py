"""The runner: how many at once, whole groups, and that nothing a rollout does can end it."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.harnesses.conftest import TaskMaker
from tests.harnesses.doubles import BookGateway, ScriptHarness
from turngate.harnesses.base import Places
from turngate.harnesses.errors import Fault
from turngate.harnesses.install import Installed
from turngate.harnesses.journal import Journal
from turngate.harnesses.rollout import Stage
from turngate.harnesses.run import make_plan
from turngate.harnesses.runner import Runner
from turngate.harnesses.sandbox import Finished, Ground, Job, Limits
from turngate.harnesses.settings import RunSettings
from turngate.harnesses.workspace import Scratch
from turngate.tasks.harbor import Task

ONE = "echo 1 > /logs/verifier/reward.txt"


class CountingSandbox:
    """Writes the reward itself, counts how many jobs run at once, and fails every `fail_every`-th job."""

    name = "counting"
    isolated = False

    def __init__(self, *, fail_every: int = 0, hold_s: float = 0.0) -> None:
        self.fail_every = fail_every
        self.hold_s = hold_s
        self.now = self.most = self.jobs = 0

    def check(self) -> None:
        """Always there."""

    def unenforced(self, limits: Limits) -> list[str]:
        """Nothing is looked at."""
        return []

    async def prepare(self, task: Task) -> Ground:
        """Nothing to make."""
        return Ground()

    def close(self) -> None:
        """Nothing to give back."""

    def places(self, installed: Installed | None, home: Path, workspace: Path, workdir: object) -> Places:
        """Host paths."""
        return Places(workspace, home, home, workspace)  # type: ignore[arg-type]

    def path(self, host: Path, wanted: object) -> Path:
        """Host paths."""
        return host

    def gateway_url(self, base_url: str) -> str:
        """Unchanged."""
        return base_url

    async def run(self, job: Job) -> Finished:
        """Hold for a moment; a verifier's job has the reward folder in its environment."""
        self.jobs += 1
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(self.hold_s)
            if self.fail_every and self.jobs % self.fail_every == 0:
                raise Fault("sandbox_start", "every so often")
            if "TURNGATE_REWARDS" in job.env:
                (Path(job.env["TURNGATE_REWARDS"]) / "reward.txt").write_text("1")
            return Finished(0, "answer", "", timed_out=False, seconds=0.0)
        finally:
            self.now -= 1


RunnerMaker = Callable[..., tuple[Runner, BookGateway]]


@pytest.fixture
def make_runner(tmp_path: Path, make_task: TaskMaker) -> Iterator[RunnerMaker]:
    """`make_runner(sandbox, tasks=3, **settings)`: a runner on a gateway that keeps books."""
    made: list[Task] = []
    with Scratch(tmp_path / "scratch") as scratch, ExitStack() as journals:

        def make(
            sandbox: object,
            *,
            tasks: int = 3,
            out: Path | None = None,
            gateway: BookGateway | None = None,
            **settings: object,
        ) -> tuple[Runner, BookGateway]:
            chosen = RunSettings.model_validate({"group_size": 4, "out": out, **settings})
            gateway = gateway or BookGateway()
            journal = journals.enter_context(Journal(out))
            made.extend(make_task(ONE) for _ in range(tasks - len(made)))
            found: list[Task] = made[:tasks]
            installed = Installed(tmp_path, tmp_path)
            stage = Stage(chosen, ScriptHarness("true"), installed, sandbox, gateway, scratch, run=journal.run)  # type: ignore[arg-type]
            return Runner(stage, make_plan(chosen, found), journal=journal), gateway

        yield make


async def test_every_group_gets_all_its_rollouts_and_no_more_than_n_are_in_flight(make_runner: RunnerMaker) -> None:
    sandbox = CountingSandbox(hold_s=0.01)
    runner, gateway = make_runner(sandbox, groups=5, concurrency=3)
    results = await runner.run()
    assert sorted(Counter(result.group for result in results).values()) == [4] * 5
    assert sandbox.most == 3
    assert len(gateway.finished) == len(gateway.created) == 20


async def test_one_epoch_runs_every_task_once(make_runner: RunnerMaker) -> None:
    runner, _ = make_runner(CountingSandbox(), tasks=4, epochs=1)
    results = await runner.run()
    assert Counter(result.task for result in results) == {f"task{number}": 4 for number in range(4)}


async def test_faults_of_some_rollouts_leave_the_others_alone(make_runner: RunnerMaker) -> None:
    runner, gateway = make_runner(CountingSandbox(fail_every=3), groups=6, concurrency=4)
    outcomes = Counter(result.outcome for result in await runner.run())
    assert outcomes["scored"] + outcomes["unscorable"] == 24
    assert min(outcomes["scored"], outcomes["unscorable"]) > 0
    assert len(gateway.finished) == 24


async def test_cancel_closes_every_session_and_returns(make_runner: RunnerMaker) -> None:
    runner, gateway = make_runner(CountingSandbox(hold_s=60.0), concurrency=6)
    running = asyncio.create_task(runner.run())
    while len(gateway.created) < 6:
        await asyncio.sleep(0.01)
    runner.cancel()
    await running
    assert set(gateway.finished) == {f"rollout{number}" for number in range(6)}
    assert {done.outcome for done in gateway.finished.values()} == {"cancelled"}


async def test_a_stop_file_completes_the_groups_that_have_begun(make_runner: RunnerMaker, tmp_path: Path) -> None:
    runner, _ = make_runner(CountingSandbox(hold_s=0.02), concurrency=4, out=tmp_path)
    running = asyncio.create_task(runner.run())
    while not runner.results:
        await asyncio.sleep(0.01)
    (tmp_path / "stop").touch()
    results = await running
    assert set(Counter(result.group for result in results).values()) == {4}


async def test_no_group_begins_while_the_trainer_is_behind(make_runner: RunnerMaker) -> None:
    runner, gateway = make_runner(CountingSandbox(), groups=2, max_ready_groups=3)
    gateway.ready_groups = 3
    running = asyncio.create_task(runner.run())
    await asyncio.sleep(0.2)
    assert gateway.created == []
    gateway.ready_groups = 2
    assert len(await running) == 8


async def test_a_gateway_that_stays_away_ends_the_run(make_runner: RunnerMaker) -> None:
    runner, gateway = make_runner(CountingSandbox(), concurrency=1)
    gateway.down = True
    await runner.run()
    assert runner.deserted
    assert len(runner.results) == 3


async def test_a_wrong_key_ends_the_run_at_once(make_runner: RunnerMaker) -> None:
    runner, gateway = make_runner(CountingSandbox(), concurrency=1)
    gateway.wrong_key = True
    await runner.run()
    assert "administration key" in runner.locked_out
    assert len(runner.results) == 1


async def test_results_are_one_json_line_each(make_runner: RunnerMaker, tmp_path: Path) -> None:
    runner, _ = make_runner(CountingSandbox(), groups=1, out=tmp_path)
    await runner.run()
    lines = [json.loads(line) for line in (tmp_path / "runner.jsonl").read_text().splitlines()]
    assert [line["outcome"] for line in lines] == ["scored"] * 4
    assert {"id", "task", "group", "reward", "cause", "seconds", "version", "turns"} <= set(lines[0])
