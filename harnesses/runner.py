"""The runner: keeps N rollouts in flight, whole groups after one another, until told to stop.

A failed rollout never ends the run. `stop()` lets groups in flight complete, `cancel()` ends them now and closes their
sessions; either way no sandbox and no open session is left when `run()` returns.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from turngate.harnesses.batches import Batches
from turngate.harnesses.errors import Fault
from turngate.harnesses.groups import Plan, Slot
from turngate.harnesses.journal import Journal
from turngate.harnesses.refusals import Refusals
from turngate.harnesses.resume import close_left_open, take_up
from turngate.harnesses.rollout import Ending, Result, Stage, run_rollout
from turngate.proxy.wire import Outcome

POLL_S = 0.5
GIVE_UP_AFTER = 3
"""So many rollouts in a row without a gateway, each after the full patience, end the run."""
GROUP_CLOSED = "status 409"
STOP_FILE = "stop"


class Runner:
    """Drives `plan` on `stage`; every result goes to `on_result` and to the journal."""

    def __init__(
        self,
        stage: Stage,
        plan: Plan,
        *,
        journal: Journal | None = None,
        on_result: Callable[[Result], None] | None = None,
    ) -> None:
        self._stage = stage
        self._plan = plan
        self._journal = journal or Journal(None)
        self._out: Path | None = stage.settings.out
        self._on_result = on_result
        self._flying: dict[asyncio.Task[Result], tuple[Slot, Ending]] = {}
        self._due_s: dict[str, float] = {}
        size = stage.settings.batch_groups
        self._batches = None if size is None else Batches(size, stage.settings.policy)
        self._cancelled = False
        self._deserted = 0
        self._refusals = Refusals(len(plan.tasks), stage.settings.group_size)
        self.results: list[Result] = []

    @property
    def in_flight(self) -> int:
        """Rollouts running now."""
        return len(self._flying)

    @property
    def deserted(self) -> bool:
        """Whether the run ended because the gateway was gone."""
        return self._deserted >= GIVE_UP_AFTER

    @property
    def locked_out(self) -> str:
        """What the gateway said of the key when it refused it."""
        return self._refusals.locked_out

    @property
    def why_ended(self) -> str:
        """Why the run ended before it was done; empty where it did not."""
        if self.deserted:
            return "the gateway is gone; is it running, and is `gateway` right?"
        if self.locked_out:
            return f"the gateway refused the key, {self.locked_out}"
        return self._refusals.hopeless

    @property
    def cancelled(self) -> bool:
        """Whether `cancel()` was called."""
        return self._cancelled

    def stop(self) -> None:
        """Begin no new group; complete the ones that have begun."""
        self._plan.close()

    def cancel(self) -> None:
        """End everything in flight now; started again with the same folder, the run makes those rollouts anew."""
        self._cancelled = True
        self._plan.drop()
        self._end([slot for slot, _ in self._flying.values()], Ending("runner_stopped", replaced=self._out is not None))

    async def run(self) -> list[Result]:
        """Run to the end of the plan, a stop, or a cancel; all results, in the order in which they came.

        Results of an earlier runner in the same folder come first, and its unfinished groups go on.
        """
        self.results += await take_up(self._stage, self._plan, self._journal)
        try:
            while True:
                if self._out is not None and (self._out / STOP_FILE).exists():
                    self.stop()
                self._end_due_groups()
                waiting = await self._fill()
                if not self._flying:
                    if not waiting:
                        return self.results
                    await asyncio.sleep(POLL_S)
                    continue
                done, _ = await asyncio.wait(self._flying, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    self._take(task, *self._flying.pop(task))
        finally:
            for task in self._flying:
                task.cancel()
            await asyncio.gather(*self._flying, return_exceptions=True)
            if not self.deserted and not self.locked_out:
                await close_left_open(self._stage)

    async def _fill(self) -> bool:
        """Start attempts while there is room; True when the plan waits for the trainer rather than being done."""
        while len(self._flying) < self._stage.settings.concurrency:
            if await self._trainer_is_behind():
                return not self._cancelled
            if not self._plan.has_pending:
                group = self._plan.begin_group()
                if group is None:
                    return False
                self._journal.begun(group)
                if self._batches is not None:
                    self._batches.begin_group()
            slot, ending = self._plan.next_pending(), Ending()
            self._due_s.setdefault(slot.group, time.monotonic() + self._stage.settings.group_deadline)
            attempt = run_rollout(self._stage, slot.task, slot.group, index=slot.index, ending=ending)
            self._flying[asyncio.create_task(attempt)] = (slot, ending)
        return False

    async def _trainer_is_behind(self) -> bool:
        """Whether enough finished groups wait already, or the batch before is not trained and published yet."""
        if self._batches is not None:
            return await self._batch_waits(self._batches)
        most = self._stage.settings.max_ready_groups
        if most is None or self._plan.closed or self._plan.has_pending:
            return False
        try:
            return (await self._stage.gateway.status()).groups.get("ready", 0) >= most
        except Fault as fault:
            self._not_told(fault)
            return False

    async def _batch_waits(self, batches: Batches) -> bool:
        """Whether the next attempt is of a batch that may not begin yet."""
        pending = self._plan.has_pending
        if batches.under_way if pending else self._plan.closed or batches.open:
            return False
        if self._flying:
            return True
        try:
            status = await self._stage.gateway.status()
        except Fault as fault:
            self._not_told(fault)
            return True
        return not (batches.may_go_on(status) if pending else batches.may_begin(status))

    def _not_told(self, fault: Fault) -> None:
        """The gateway would not say how far the trainer is."""
        if fault.cause == "gateway_refused":
            self._refusals.refused(fault.detail)
            if self.why_ended:
                self._plan.drop()

    def _end_due_groups(self) -> None:
        """Give up groups whose time is over: the gateway scores them from what was scored until then."""
        now_s = time.monotonic()
        for group in [name for name, due_s in self._due_s.items() if due_s <= now_s]:
            del self._due_s[group]
            self._end(self._plan.give_up(group), Ending("group_deadline"))

    def _end(self, slots: Iterable[Slot], why: Ending) -> None:
        """Cancel the rollouts of these slots; their results come as cancelled with that cause."""
        ended = {(slot.group, slot.index) for slot in slots}
        for task, (slot, ending) in self._flying.items():
            if (slot.group, slot.index) in ended and not ending.begun:
                ending.cause, ending.replaced, ending.begun = why.cause, why.replaced, True
                task.cancel()

    def _take(self, task: asyncio.Task[Result], slot: Slot, ending: Ending) -> None:
        """Record one finished attempt."""
        if task.cancelled():
            result = _ended(slot, "cancelled", ending.cause, "")
        elif (error := task.exception()) is not None:
            result = _ended(slot, "unscorable", "runner_error", f"{type(error).__name__}: {error}")
        else:
            result = task.result()
        if result.id is None and result.cause == "gateway_refused" and result.detail.startswith(GROUP_CLOSED):
            result = _ended(slot, "cancelled", "group_closed", result.detail)
            self._plan.give_up(slot.group)
        self._end(self._plan.ended(slot, scored=result.outcome == "scored"), Ending("oversampled"))
        self.results.append(result)
        self._journal.ended(slot, result)
        if self._on_result is not None:
            self._on_result(result)
        self._deserted = self._deserted + 1 if result.cause == "gateway_unavailable" else 0
        if result.cause != "gateway_refused":
            self._refusals.reset()
        elif result.id is not None or not any(other.opened for _, other in self._flying.values()):
            self._refusals.refused(result.detail, slot.task.name)
        if self.why_ended:
            self._plan.drop()


def _ended(slot: Slot, outcome: Outcome, cause: str, detail: str) -> Result:
    """The result of an attempt that did not come back by itself."""
    return Result(None, slot.task.name, slot.group, outcome, None, cause, detail, 0.0, None, 0)
