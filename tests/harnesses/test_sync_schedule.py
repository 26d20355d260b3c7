"""The synchronous schedule as the runner keeps it: nothing of a batch begins before the batch before is live."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harnesses.conftest import TaskMaker
from tests.harnesses.doubles import BookGateway, ScriptHarness
from tests.harnesses.test_runner import ONE, CountingSandbox
from turngate.harnesses import runner as runner_module
from turngate.harnesses.batches import UNSETTLED
from turngate.harnesses.errors import Fault
from turngate.harnesses.install import Installed
from turngate.harnesses.journal import Journal
from turngate.harnesses.rollout import Stage
from turngate.harnesses.run import make_plan
from turngate.harnesses.runner import Runner
from turngate.harnesses.sandbox import Ground
from turngate.harnesses.settings import RunSettings
from turngate.harnesses.workspace import Scratch
from turngate.proxy import wire
from turngate.tasks.harbor import Task

MOMENT_S = 0.002
QUIET = 150
"""So many moments without an open group end a short batch."""


@dataclass(frozen=True)
class Began:
    """What there was when a group's first session was opened: the live version, the groups without a fate."""

    version: int
    unsettled: set[str]


class TrainedGateway(BookGateway):
    """Books with a trainer: a batch whose groups have all closed is trained, published and settled, in that order.

    `began` has the groups in the order in which their first sessions were opened, `settled_in` the round in which they
    were settled, `made` the version that was live after each round.
    """

    def __init__(self, batch: int, *, teaches: bool = True) -> None:
        super().__init__()
        self.batch = batch
        self.teaches = teaches
        self.version = 1
        self.state: dict[str, str] = {}
        self.began: dict[str, Began] = {}
        self.rounds = 0
        self.settled_in: dict[str, int] = {}
        self.made: dict[int, int] = {0: self.version}

    async def create(self, new: wire.NewRollout) -> wire.RolloutCreated:
        """Open a session, a moment after it was asked for."""
        await asyncio.sleep(MOMENT_S)
        assert new.group is not None
        if self.state.get(new.group, "open") != "open":
            raise Fault("gateway_refused", f"status 409: group {new.group} is closed")
        created = await super().create(new)
        if new.group not in self.began:
            unsettled = {name for name, state in self.state.items() if state in UNSETTLED}
            self.began[new.group] = Began(self.version, unsettled)
            self.state[new.group] = "open"
        return created

    async def status(self) -> wire.Status:
        """States of the groups and the version."""
        await asyncio.sleep(MOMENT_S)
        told = await super().status()
        policy = wire.PolicyInfo(policy="policy", base_model="base", version=self.version, live=[])
        return told.model_copy(update={"groups": dict(Counter(self.state.values())), "policies": [policy]})

    def close_groups(self) -> None:
        """Close what has all its attempts or enough of them scored, as the gateway does."""
        ended: dict[str, list[wire.FinishRollout]] = defaultdict(list)
        for rollout, told in self.finished.items():
            if not told.replaced:
                ended[self.new[rollout].group or ""].append(told)
        for group, closings in ended.items():
            first = next(new for new in self.new.values() if new.group == group)
            scored = sum(one.outcome == "scored" for one in closings)
            if self.state[group] == "open" and (
                scored >= (first.group_size or 0) or len(closings) >= (first.group_attempts or 0)
            ):
                self.state[group] = "leased" if scored > 1 else "dropped"

    async def train_forever(self) -> None:
        """Settle whole batches, and short ones after a while."""
        quiet = 0
        while True:
            await asyncio.sleep(MOMENT_S)
            self.close_groups()
            new = [group for group in self.state if group not in self.settled_in][: self.batch]
            quiet = 0 if "open" in self.state.values() else quiet + 1
            if not quiet or not new or (len(new) < self.batch and quiet < QUIET):
                continue
            await asyncio.sleep(10 * MOMENT_S)
            leased = [group for group in new if self.state[group] == "leased"]
            self.version += self.teaches and bool(leased)
            self.rounds += 1
            self.settled_in.update(dict.fromkeys(new, self.rounds))
            self.made[self.rounds] = self.version
            for group in leased:
                self.state[group] = "trained" if self.teaches else "zero_variance"
                await asyncio.sleep(MOMENT_S)
            quiet = 0


@asynccontextmanager
async def trainer_of(gateway: TrainedGateway) -> AsyncIterator[None]:
    """Its trainer, at work until everything that began is settled."""
    training = asyncio.create_task(gateway.train_forever())
    try:
        yield
        while set(gateway.state) - set(gateway.settled_in):
            await asyncio.sleep(MOMENT_S)
    finally:
        training.cancel()
        with suppress(asyncio.CancelledError):
            await training


SyncRunner = Callable[..., Runner]


@pytest.fixture
def sync_runner(tmp_path: Path, make_task: TaskMaker, monkeypatch: pytest.MonkeyPatch) -> Iterator[SyncRunner]:
    """`sync_runner(gateway, sandbox, tasks=4, **settings)`: a runner in batches of the gateway's size."""
    made: list[Task] = []
    monkeypatch.setattr(runner_module, "POLL_S", 5 * MOMENT_S)
    with Scratch(tmp_path / "scratch") as scratch, ExitStack() as journals:

        def make(gateway: TrainedGateway, sandbox: CountingSandbox, *, tasks: int = 4, **settings: object) -> Runner:
            chosen = RunSettings.model_validate({"batch_groups": gateway.batch, **settings})
            journal = journals.enter_context(Journal(chosen.out))
            made.extend(make_task(ONE) for _ in range(tasks - len(made)))
            installed = Installed(tmp_path, tmp_path)
            stage = Stage(chosen, ScriptHarness("true"), installed, sandbox, gateway, scratch, run=journal.run)  # type: ignore[arg-type]
            return Runner(stage, make_plan(chosen, made), journal=journal)

        make.close_journals = journals.close  # type: ignore[attr-defined]
        yield make


def assert_batches_do_not_overlap(gateway: TrainedGateway) -> None:
    """Each group began with the version made of the batch before its own, beside none of another batch."""
    for group, began in gateway.began.items():
        settled = gateway.settled_in[group]
        assert began.version == gateway.made[settled - 1], f"{group} of batch {settled} began with {began.version}"
        beside = {other for other in began.unsettled if gateway.settled_in[other] != settled}
        assert not beside, f"{group} began beside {beside}"


@pytest.mark.parametrize(
    ("batch", "size", "concurrency", "extra", "teaches"),
    [
        pytest.param(2, 2, 16, 0, True, id="more places than a batch has rollouts"),
        pytest.param(2, 2, 16, 0, False, id="nothing to train"),
        pytest.param(2, 2, 5, 0, True, id="one place left over"),
        pytest.param(2, 2, 4, 0, True, id="as many places as a batch"),
        pytest.param(3, 2, 4, 0, True, id="a batch and a half in flight"),
        pytest.param(3, 2, 1, 0, True, id="one place"),
        pytest.param(1, 3, 2, 0, True, id="batches of one group"),
        pytest.param(2, 2, 16, 2, True, id="surplus rollouts"),
        pytest.param(2, 2, 3, 1, False, id="surplus rollouts, nothing to train"),
    ],
)
async def test_nothing_of_a_batch_begins_before_the_version_of_the_batch_before_is_live(
    sync_runner: SyncRunner, batch: int, size: int, concurrency: int, extra: int, teaches: bool
) -> None:
    gateway = TrainedGateway(batch, teaches=teaches)
    settings = {"group_size": size, "concurrency": concurrency, "extra_rollouts": extra, "groups": 3 * batch}
    async with trainer_of(gateway):
        await sync_runner(gateway, CountingSandbox(hold_s=MOMENT_S), **settings).run()
    assert len(gateway.began) == 3 * batch
    assert_batches_do_not_overlap(gateway)


async def test_groups_that_fail_hold_back_no_batch_and_let_none_begin_early(sync_runner: SyncRunner) -> None:
    gateway = TrainedGateway(2)
    sandbox = CountingSandbox(fail_every=2, hold_s=MOMENT_S)
    async with trainer_of(gateway):
        await sync_runner(gateway, sandbox, group_size=2, concurrency=9, groups=8, retries=0).run()
    assert "dropped" in gateway.state.values()
    assert_batches_do_not_overlap(gateway)


async def test_a_batch_of_which_every_session_is_refused_is_over_with_its_last_answer(sync_runner: SyncRunner) -> None:
    gateway = TrainedGateway(2)
    gateway.refuses.update({f"task{number}": "status 422: not this one" for number in (1, 3)})
    async with trainer_of(gateway):
        results = await sync_runner(gateway, CountingSandbox(), group_size=2, concurrency=9, epochs=2).run()
    assert Counter(result.outcome for result in results)["unscorable"] == 8


async def test_a_batch_begins_when_its_slowest_ground_is_ready_and_the_next_waits_for_it(
    sync_runner: SyncRunner,
) -> None:
    gateway = TrainedGateway(2)
    async with trainer_of(gateway):
        await sync_runner(gateway, SlowGround(), group_size=2, concurrency=9, groups=6).run()
    assert_batches_do_not_overlap(gateway)


class SlowGround(CountingSandbox):
    """The ground of every third attempt takes as long as other whole rollouts: no session is open meanwhile."""

    prepared = 0

    async def prepare(self, task: Task) -> Ground:
        """Wait now and then."""
        self.prepared += 1
        await asyncio.sleep(0 if self.prepared % 3 else 50 * MOMENT_S)
        return Ground()


async def test_a_runner_started_again_goes_on_with_what_the_gateway_still_waits_for(
    sync_runner: SyncRunner, tmp_path: Path
) -> None:
    gateway = TrainedGateway(2)
    settings = {"group_size": 2, "concurrency": 2, "groups": 6, "out": tmp_path / "run"}
    async with trainer_of(gateway):
        first = sync_runner(gateway, CountingSandbox(hold_s=60.0), **settings)
        running = asyncio.create_task(first.run())
        while not gateway.created:
            await asyncio.sleep(MOMENT_S)
        first.cancel()
        await running
        sync_runner.close_journals()  # type: ignore[attr-defined]
        await sync_runner(gateway, CountingSandbox(), **settings).run()
    assert Counter(gateway.state.values()) == {"trained": 6}
    assert_batches_do_not_overlap(gateway)


async def test_a_group_written_down_but_never_opened_waits_until_the_rest_of_its_batch_is_settled(
    sync_runner: SyncRunner, tmp_path: Path
) -> None:
    gateway = TrainedGateway(2)
    settings = {"group_size": 2, "concurrency": 2, "groups": 2, "out": tmp_path / "run"}
    first = sync_runner(gateway, Unready(), **settings)
    running = asyncio.create_task(first.run())
    while not first.in_flight:
        await asyncio.sleep(MOMENT_S)
    gateway.state["earlier"], gateway.settled_in["earlier"] = "leased", 0
    first.cancel()
    await running
    sync_runner.close_journals()  # type: ignore[attr-defined]
    again = asyncio.create_task(sync_runner(gateway, CountingSandbox(), **settings).run())
    await asyncio.sleep(20 * MOMENT_S)
    assert gateway.created == []
    gateway.state["earlier"] = "trained"
    async with trainer_of(gateway):
        await again
    assert len(gateway.began) == 2


class Unready(CountingSandbox):
    """Its ground is never ready."""

    async def prepare(self, task: Task) -> Ground:
        """Wait until cancelled."""
        await asyncio.sleep(3600)
        return Ground()
