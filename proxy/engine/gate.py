"""Admission to one engine: turns wait here, first come first served, while it has a queue or its KV cache is full.

A turn that waits here can still go to another replica and costs the engine nothing. What the engine says of itself is
a second old, so the gateway's own turns since then are added. It must never hold back a turn that the engine would run.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from turngate.proxy.engine.errors import EngineBusy, EngineUnavailable
from turngate.proxy.engine.types import EngineLoad


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """When an engine is full, and how long a turn waits for it.

    `queue`: turns that may wait inside the engine, None for no limit; with the KV cache above `kv_usage` only one may.
    `wait_s`: longest wait here, 0 refuses at once.
    """

    queue: int | None = None
    kv_usage: float = 1.0
    wait_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Observed:
    """What an engine said about its load when this gateway had `own` turns there."""

    load: EngineLoad
    own: int


def waiting_now(observed: Observed, own: int) -> int:
    """How many turns wait inside the engine by now: one more for each sent since, one fewer for each that ended."""
    return max(0, observed.load.waiting + own - observed.own)


def has_room(observed: Observed | None, own: int, limits: AdmissionLimits) -> bool:
    """Whether an engine takes one more turn; one that says nothing of itself always does."""
    if observed is None:
        return True
    waiting = waiting_now(observed, own)
    if limits.queue is not None and waiting >= limits.queue:
        return False
    return observed.load.kv_usage < limits.kv_usage or waiting == 0


class Gate:
    """The way into one engine. One event loop's; the caller reports loads with `observe`."""

    def __init__(
        self,
        engine: str,
        limits: AdmissionLimits,
        count: Callable[[str, str], None] = lambda metric, engine: None,
    ) -> None:
        self.own = 0
        """Turns inside now."""
        self._count = count
        self.observed: Observed | None = None
        self._engine = engine
        self._limits = limits
        self._queue: deque[asyncio.Future[None]] = deque()

    @property
    def queued(self) -> int:
        """Turns waiting here."""
        return len(self._queue)

    @property
    def foreign(self) -> int:
        """Requests in the engine that are not this gateway's, as of the last look."""
        if self.observed is None:
            return 0
        return max(0, self.observed.load.running + self.observed.load.waiting - self.observed.own)

    @asynccontextmanager
    async def turn(self) -> AsyncGenerator[None, None]:
        """Be inside, once there is room.

        Raises:
            EngineBusy: there was none within the limit.
            EngineUnavailable: the engine went away meanwhile.
        """
        await self._enter()
        try:
            yield
        finally:
            self.own -= 1
            self._let_in()

    def observe(self, load: EngineLoad) -> None:
        """The engine's load at this moment."""
        self.observed = Observed(load, self.own)
        self._let_in()

    def away(self) -> None:
        """The engine is gone: who waits must go elsewhere, and what it said of itself is void."""
        self.observed = None
        while self._queue:
            waiter = self._queue.popleft()
            if not waiter.done():
                waiter.set_exception(EngineUnavailable(f"{self._engine} went away while turns waited for it"))

    async def _enter(self) -> None:
        if not self._queue and has_room(self.observed, self.own, self._limits):
            self.own += 1
            return
        if not self._limits.wait_s:
            self._count("turngate_admission_refusals_total", self._engine)
            raise EngineBusy(f"{self._engine} has no room now")
        self._count("turngate_admission_waits_total", self._engine)
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(waiter)
        try:
            async with asyncio.timeout(self._limits.wait_s):
                await waiter
        except BaseException as error:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.own -= 1  # let in at the same moment
                self._let_in()
            elif waiter in self._queue:
                self._queue.remove(waiter)
            if isinstance(error, TimeoutError):
                self._count("turngate_admission_refusals_total", self._engine)
                raise EngineBusy(f"{self._engine} had no room for {self._limits.wait_s:g} s") from error
            raise

    def _let_in(self) -> None:
        while self._queue and has_room(self.observed, self.own, self._limits):
            waiter = self._queue.popleft()
            if not waiter.done():
                self.own += 1
                waiter.set_result(None)
