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
from turngate.harnesses.errors import Fault, OutBusy
from turngate.harnesses.install import Installed
from turngate.harnesses.journal import Journal
from turngate.harnesses.refusals import ENOUGH
from turngate.harnesses.rollout import Stage
from turngate.harnesses.run import make_plan
from turngate.harnesses.runner import Runner
from turngate.harnesses.sandbox import Finished, Ground, Job, Limits
from turngate.harnesses.settings import RunSettings
from turngate.harnesses.workspace import Scratch
from turngate.proxy import wire
from turngate.tasks.harbor import Task

ONE = "echo 1 > /logs/verifier/reward.txt"


class CountingSandbox:
    """Writes the reward itself, counts how many jobs run at once, and fails every `fail_every`-th job."""

    name = "counting"
    isolated = False

    def __init__(self, *, fail_every: int = 0, hold_s: float = 0.0) -> None:
        self.fail_every = fail_every
        self.hold_s = hold_s
        self.fail_first = 0
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
            if self.jobs <= self.fail_first or (self.fail_every and self.jobs % self.fail_every == 0):
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

        make.close_journals = journals.close  # type: ignore[attr-defined]
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


@pytest.mark.parametrize("status", [404, 422, 500])
async def test_the_same_refusal_of_everything_ends_the_run_with_its_words(
    make_runner: RunnerMaker, status: int
) -> None:
    runner, gateway = make_runner(CountingSandbox(), concurrency=4)
    gateway.refuses["*"] = f"status {status}: no such thing as a budget of 12 colours"
    await runner.run()
    assert "in a row, always the same" in runner.why_ended
    assert f"status {status}: no such thing" in runner.why_ended
    assert len(runner.results) < ENOUGH + 8


async def test_a_task_that_is_refused_among_others_that_are_not_ends_nothing(make_runner: RunnerMaker) -> None:
    runner, gateway = make_runner(CountingSandbox(), tasks=3, epochs=8, group_size=8, concurrency=4)
    gateway.refuses["task1"] = "status 422: this task's name is too long"
    results = await runner.run()
    assert runner.why_ended == ""
    assert Counter(result.outcome for result in results) == {"scored": 2 * 8 * 8, "unscorable": 8 * 8}


async def test_refusals_while_other_sessions_are_open_end_nothing(make_runner: RunnerMaker) -> None:
    runner, gateway = make_runner(CountingSandbox(hold_s=0.5), tasks=4, epochs=1, group_size=10, concurrency=20)
    gateway.refuses.update({f"task{number}": "status 422: not this one" for number in (1, 2, 3)})
    await runner.run()
    assert runner.why_ended == ""


async def test_different_refusals_are_not_counted_together(make_runner: RunnerMaker) -> None:
    runner, gateway = make_runner(CountingSandbox(), tasks=2, epochs=1, group_size=ENOUGH, concurrency=1)
    gateway.refuses.update({"task0": "status 422: one", "task1": "status 422: another"})
    assert len(await runner.run()) == 2 * ENOUGH
    assert runner.why_ended == ""


async def test_results_that_are_always_refused_end_the_run_too(make_runner: RunnerMaker) -> None:
    runner, gateway = make_runner(CountingSandbox(), concurrency=4)
    gateway.refuses_to_finish = "status 422: rewards must be numbers"
    await runner.run()
    assert "rewards must be numbers" in runner.why_ended


async def test_a_gateway_that_refuses_to_say_how_far_the_trainer_is_ends_the_run(make_runner: RunnerMaker) -> None:
    runner, gateway = make_runner(CountingSandbox(), max_ready_groups=1)
    gateway.refuses_status = "status 401: this needs the administration key"
    await runner.run()
    assert "refused the key" in runner.why_ended


async def test_results_are_one_json_line_each(make_runner: RunnerMaker, tmp_path: Path) -> None:
    runner, _ = make_runner(CountingSandbox(), groups=1, out=tmp_path)
    await runner.run()
    lines = [json.loads(line) for line in (tmp_path / "runner.jsonl").read_text().splitlines()]
    assert [line["outcome"] for line in lines] == ["scored"] * 4
    assert {"id", "task", "group", "reward", "cause", "seconds", "version", "turns"} <= set(lines[0])


class ByIndexSandbox(CountingSandbox):
    """Agents hold for `holds[n]` seconds, n counting the agents' jobs; verifiers take none."""

    def __init__(self, holds: list[float]) -> None:
        super().__init__()
        self.holds = iter(holds)
        self.ended: list[str] = []

    async def run(self, job: Job) -> Finished:
        """Hold, or be cancelled."""
        if "TURNGATE_REWARDS" not in job.env:
            try:
                await asyncio.sleep(next(self.holds))
            except asyncio.CancelledError:
                self.ended.append(job.argv[0])
                raise
        return await super().run(job)


async def test_of_an_oversampled_group_the_first_are_scored_and_the_rest_is_cancelled(make_runner: RunnerMaker) -> None:
    sandbox = ByIndexSandbox([60.0, 0.0, 0.0, 60.0])
    runner, gateway = make_runner(sandbox, groups=1, group_size=2, extra_rollouts=2, concurrency=4)
    results = await runner.run()
    assert Counter((result.outcome, result.cause) for result in results) == {
        ("scored", None): 2,
        ("cancelled", "oversampled"): 2,
    }
    assert len(sandbox.ended) == 2
    told = [(done.outcome, done.cause, done.replaced) for done in gateway.finished.values()]
    assert told.count(("cancelled", "oversampled", False)) == 2
    assert {(new.group_size, new.group_attempts) for new in gateway.created} == {(2, 4)}


async def test_attempts_of_an_oversampled_group_that_have_not_begun_never_begin(make_runner: RunnerMaker) -> None:
    runner, gateway = make_runner(CountingSandbox(), groups=1, group_size=2, extra_rollouts=5, concurrency=1)
    assert [result.outcome for result in await runner.run()] == ["scored", "scored"]
    assert len(gateway.created) == 2


async def test_what_runs_of_a_group_when_its_time_is_over_is_ended(make_runner: RunnerMaker) -> None:
    sandbox = ByIndexSandbox([0.0, 60.0, 60.0])
    runner, gateway = make_runner(sandbox, groups=1, group_size=3, concurrency=3, group_deadline_s=0.5)
    causes = Counter(result.cause for result in await runner.run())
    assert causes == {None: 1, "group_deadline": 2}
    assert len(gateway.finished) == 3


async def test_a_fault_before_the_first_turn_is_tried_again_in_a_new_session(make_runner: RunnerMaker) -> None:
    sandbox = CountingSandbox()
    sandbox.fail_first = 1
    runner, gateway = make_runner(sandbox, groups=1, group_size=1, retries=2)
    gateway.turns_by_session = {"rollout0": 0}
    result = (await runner.run())[0]
    assert (result.outcome, result.id, result.retried) == ("scored", "rollout1", ("sandbox_start",))
    told = gateway.finished["rollout0"]
    assert (told.outcome, told.cause, told.replaced) == ("unscorable", "sandbox_start", True)


async def test_retries_are_bounded(make_runner: RunnerMaker) -> None:
    runner, gateway = make_runner(CountingSandbox(fail_every=1), groups=1, group_size=1, retries=2)
    gateway.turns = 0
    result = (await runner.run())[0]
    assert (result.outcome, result.cause, len(result.retried)) == ("unscorable", "sandbox_start", 2)
    assert [done.replaced for done in gateway.finished.values()] == [True, True, False]


async def test_a_fault_after_the_first_turn_is_unscorable_and_never_tried_again(make_runner: RunnerMaker) -> None:
    runner, gateway = make_runner(CountingSandbox(fail_every=1), groups=1, group_size=1, retries=2)
    result = (await runner.run())[0]
    assert (result.outcome, result.retried) == ("unscorable", ())
    assert len(gateway.created) == 1


async def test_cancelled_while_opening_a_session_it_is_closed_all_the_same(make_runner: RunnerMaker) -> None:
    runner, gateway = make_runner(CountingSandbox(), concurrency=4)
    gateway.hold_create_s = 0.3
    running = asyncio.create_task(runner.run())
    while len(gateway.created) < 4:
        await asyncio.sleep(0.01)
    runner.cancel()
    await running
    assert {done.outcome for done in gateway.finished.values()} == {"cancelled"}
    assert await gateway.open_rollouts() == []


async def test_a_group_that_the_gateway_has_closed_is_given_up(make_runner: RunnerMaker, tmp_path: Path) -> None:
    runner, gateway = make_runner(CountingSandbox(), groups=2, concurrency=1)
    running = asyncio.create_task(runner.run())
    while not gateway.created:
        await asyncio.sleep(0)
    gateway.closed_groups.add(str(gateway.created[0].group))
    causes = Counter(result.cause for result in await running)
    assert causes == {None: 5, "group_closed": 1}


async def test_a_rollout_that_the_gateway_closed_itself_ended_for_its_cause(make_runner: RunnerMaker) -> None:
    runner, gateway = make_runner(CountingSandbox(), groups=1, group_size=1)
    gateway.closes_itself = wire.FinishRollout(outcome="cancelled", cause="stale")
    (result,) = await runner.run()
    assert (result.outcome, result.cause, result.reward) == ("cancelled", "stale", None)


async def test_a_run_goes_on_where_it_was_and_repeats_nothing(make_runner: RunnerMaker, tmp_path: Path) -> None:
    gateway = BookGateway()
    first, _ = make_runner(CountingSandbox(hold_s=0.02), groups=4, concurrency=3, out=tmp_path, gateway=gateway)
    running = asyncio.create_task(first.run())
    while len(first.results) < 6:
        await asyncio.sleep(0.005)
    first.cancel()
    done = {result.id for result in await running if result.outcome == "scored"}
    make_runner.close_journals()  # type: ignore[attr-defined]
    again, _ = make_runner(CountingSandbox(), groups=4, concurrency=3, out=tmp_path, gateway=gateway)
    results = await again.run()
    assert sorted(Counter(result.group for result in results).values()) == [4] * 4
    assert {result.outcome for result in results} == {"scored"}
    assert done <= {result.id for result in results}
    scored = [one for one, told in gateway.finished.items() if told.outcome == "scored"]
    assert len(scored) == 16


async def test_what_a_killed_runner_did_not_write_down_is_taken_from_the_gateway(
    make_runner: RunnerMaker, tmp_path: Path
) -> None:
    gateway = BookGateway()
    first, _ = make_runner(CountingSandbox(), groups=1, concurrency=1, out=tmp_path, gateway=gateway)
    await first.run()
    lines = (tmp_path / "runner.jsonl").read_text().splitlines()
    (tmp_path / "runner.jsonl").write_text(lines[0] + "\n" + lines[1][:20])  # as a kill leaves it
    del gateway.finished["rollout3"]  # one that was running
    make_runner.close_journals()  # type: ignore[attr-defined]
    again, _ = make_runner(CountingSandbox(), groups=1, concurrency=1, out=tmp_path, gateway=gateway)
    results = await again.run()
    assert [result.id for result in results] == ["rollout0", "rollout1", "rollout2", "rollout4"]
    left = gateway.finished["rollout3"]
    assert (left.outcome, left.cause, left.replaced) == ("cancelled", "runner_stopped", True)
    assert len(Journal(tmp_path).results()) == 4


async def test_an_attempt_whose_session_the_gateway_closed_for_silence_is_made_again(
    make_runner: RunnerMaker, tmp_path: Path
) -> None:
    gateway = BookGateway()
    first, _ = make_runner(CountingSandbox(), groups=1, concurrency=1, out=tmp_path, gateway=gateway)
    await first.run()
    lines = (tmp_path / "runner.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "runner.jsonl").write_text("".join(lines[:-1]))
    silent = wire.FinishRollout(outcome="unscorable", cause="session_idle", replaced=True)
    gateway.finished["rollout3"] = silent
    make_runner.close_journals()  # type: ignore[attr-defined]
    again, _ = make_runner(CountingSandbox(), groups=1, concurrency=1, out=tmp_path, gateway=gateway)
    results = await again.run()
    assert [result.id for result in results] == ["rollout0", "rollout1", "rollout2", "rollout4"]
    assert gateway.finished["rollout3"] is silent


async def test_results_of_another_gateways_store_do_not_count(make_runner: RunnerMaker, tmp_path: Path) -> None:
    first, _ = make_runner(CountingSandbox(), groups=1, out=tmp_path, concurrency=1)
    running = asyncio.create_task(first.run())
    while not first.results:
        await asyncio.sleep(0)
    first.cancel()
    await running
    make_runner.close_journals()  # type: ignore[attr-defined]
    again, gateway = make_runner(CountingSandbox(), groups=1, out=tmp_path)
    await again.run()
    assert len(gateway.created) == 4


def test_one_runner_at_a_time_works_in_a_folder(tmp_path: Path) -> None:
    with Journal(tmp_path), pytest.raises(OutBusy, match="another runner"), Journal(tmp_path):
        raise AssertionError
