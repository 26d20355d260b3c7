"""The runner: keeps N rollouts in flight, whole groups after one another, until told to stop.

A failed rollout never ends the run. `stop()` lets groups in flight complete, `cancel()` ends them now and closes their
sessions; either way no sandbox is left when `run()` returns.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path

from turngate.harnesses.errors import Fault
from turngate.harnesses.groups import Plan, Slot
from turngate.harnesses.rollout import Result, Stage, run_rollout
from turngate.proxy.wire import Outcome

POLL_S = 0.5
GIVE_UP_AFTER = 3
"""So many rollouts in a row without a gateway, each after the full patience, end the run."""
LOCKED_OUT = ("status 401", "status 403")
"""Details of a refusal that no later rollout can escape: the key is wrong."""
STOP_FILE = "stop"


class Runner:
    """Drives `plan` on `stage`; every result goes to `on_result` and, with `out`, to runner.jsonl."""

    def __init__(
        self, stage: Stage, plan: Plan, *, out: Path | None = None, on_result: Callable[[Result], None] | None = None
    ) -> None:
        self._stage = stage
        self._plan = plan
        self._out = out
        self._on_result = on_result
        self._flying: dict[asyncio.Task[Result], Slot] = {}
        self._cancelled = False
        self._deserted = 0
        self.locked_out = ""
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
    def cancelled(self) -> bool:
        """Whether `cancel()` was called."""
        return self._cancelled

    def stop(self) -> None:
        """Begin no new group; complete the ones that have begun."""
        self._plan.close()

    def cancel(self) -> None:
        """End everything in flight now."""
        self._cancelled = True
        self._plan.drop()
        for task in self._flying:
            task.cancel()

    async def run(self) -> list[Result]:
        """Run to the end of the plan, a stop, or a cancel; all results, in the order in which they came."""
        try:
            while True:
                if self._out is not None and (self._out / STOP_FILE).exists():
                    self.stop()
                waiting = await self._fill()
                if not self._flying:
                    if not waiting:
                        return self.results
                    await asyncio.sleep(POLL_S)
                    continue
                done, _ = await asyncio.wait(self._flying, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    self._take(task, self._flying.pop(task))
        finally:
            for task in self._flying:
                task.cancel()
            await asyncio.gather(*self._flying, return_exceptions=True)

    async def _fill(self) -> bool:
        """Start attempts while there is room; True when the plan waits for the trainer rather than being done."""
        while len(self._flying) < self._stage.settings.concurrency:
            if not self._plan.has_pending:
                if await self._trainer_is_behind():
                    return not self._cancelled
                if not self._plan.begin_group():
                    return False
            slot = self._plan.next_pending()
            self._flying[asyncio.create_task(run_rollout(self._stage, slot.task, slot.group))] = slot
        return False

    async def _trainer_is_behind(self) -> bool:
        """Whether enough finished groups wait already."""
        most = self._stage.settings.max_ready_groups
        if most is None:
            return False
        try:
            return (await self._stage.gateway.status()).groups.get("ready", 0) >= most
        except Fault:
            return False

    def _take(self, task: asyncio.Task[Result], slot: Slot) -> None:
        """Record one finished attempt."""
        if task.cancelled():
            result = _ended(slot, "cancelled", "runner_stopped", "")
        elif (error := task.exception()) is not None:
            result = _ended(slot, "unscorable", "runner_error", f"{type(error).__name__}: {error}")
        else:
            result = task.result()
        self.results.append(result)
        if self._out is not None:
            line = {"time": time.time(), "index": slot.index, **result.as_json()}
            with (self._out / "runner.jsonl").open("a", encoding="utf-8") as log:
                log.write(json.dumps(line, ensure_ascii=False) + "\n")
        if self._on_result is not None:
            self._on_result(result)
        self._deserted = self._deserted + 1 if result.cause == "gateway_unavailable" else 0
        if result.cause == "gateway_refused" and result.detail.startswith(LOCKED_OUT):
            self.locked_out = result.detail
        if self.deserted or self.locked_out:
            self._plan.drop()


def _ended(slot: Slot, outcome: Outcome, cause: str, detail: str) -> Result:
    """The result of an attempt that did not come back by itself."""
    return Result(None, slot.task.name, slot.group, outcome, None, cause, detail, 0.0, None, 0)
