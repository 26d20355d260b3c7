"""Commits of turns: at once where that only copies into the page cache, else by a thread that takes whatever is queued.

The event loop never waits for the disk: checkpoints, which do, are the thread's, and so are all commits while one runs,
where each is synced (`durability: full`), or where the disk was slow or the file locked. A turn whose `commit` was
cancelled is still written: what was sampled is recorded.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from turngate.proxy.store.database import BUSY_TIMEOUT_S
from turngate.proxy.store.errors import StoreBusy, StoreClosed, StoreError, StoreFull
from turngate.proxy.store.turnstore import LOCK_PATIENCE_S, TurnStore
from turngate.proxy.turns import Turn

MAX_BATCH = 256  # bounds how long the first turn of a batch waits for the others to be packed
SLOW_S = 0.02
"""A commit at once that took longer: the disk stalls, so the thread commits for the next `SLOW_FOR_S`."""

SLOW_FOR_S = 30.0


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A turn for the thread, or None: a checkpoint. `over` is called in the loop, before who awaits `done` goes on."""

    turn: Turn | None
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[None]
    over: Callable[[], None]

    def settle(self, error: Exception | None) -> None:
        """Wake the awaiting caller from the writer's thread; its loop may be gone at shutdown."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._set, error)

    def _set(self, error: Exception | None) -> None:
        self.over()
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


class TurnWriter:
    """Commits turns of many sessions to one `TurnStore`. The store stays the caller's to close, after this.

    One event loop's; only what begins with `_thread_` runs elsewhere.
    """

    def __init__(self, store: TurnStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._queue: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._closed = False
        self._under_way = 0
        """What the thread was given and has not said to be over."""
        self._slow_until_s = 0.0
        store.wait_for_nobody()
        self._thread = threading.Thread(target=self._thread_run, name="turn-writer", daemon=True)
        self._thread.start()

    @property
    def takes_now(self) -> bool:
        """Whether `commit_now` may be called: it would not wait for the disk, nor pass turns that are queued."""
        waits = self._under_way or self._closed or self._store.syncs
        return not waits and self._clock() >= self._slow_until_s

    def commit_now(self, turn: Turn) -> bool:
        """Commit `turn` in this thread, without a wait; only where `takes_now`. Returns whether it is in the store.

        It is not where another program has the file locked: `commit` waits for that.

        Raises:
            StoreFull, Conflict, StoreClosed, StoreError: the turn is not in the store.
        """
        begun_s = self._clock()
        error = self._try([turn])
        ended_s = self._clock()
        busy = isinstance(error, StoreBusy)
        self._slow_until_s = ended_s + SLOW_FOR_S if busy or ended_s - begun_s > SLOW_S else 0.0
        self._checkpoint_if_due()
        if error is not None and not busy:
            raise error
        return not busy

    async def commit(self, turn: Turn) -> None:
        """Return once the transaction that holds `turn` is committed; turns that wait together share one.

        Raises:
            StoreFull, Conflict, StoreClosed, StoreError: the turn is not in the store.
        """
        if self._closed:
            raise StoreClosed("the turn writer is closed; no more turns can be recorded")
        await self._give(turn)
        self._checkpoint_if_due()

    async def close(self) -> None:
        """Write everything queued, then stop the thread."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    def _give(self, turn: Turn | None) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        waiting = _Waiting(turn, loop, loop.create_future(), self._over)
        self._under_way += 1
        self._queue.put(waiting)
        return waiting.done

    def _over(self) -> None:
        self._under_way -= 1

    def _checkpoint_if_due(self) -> None:
        if self._store.checkpoint_due and not self._under_way and not self._closed:
            self._give(None)

    def _thread_run(self) -> None:
        while (first := self._queue.get()) is not None:
            batch, last = [first], False
            while len(batch) < MAX_BATCH and not self._queue.empty():
                following = self._queue.get()
                if following is None:
                    last = True
                    break
                batch.append(following)
            self._thread_write(batch)
            if last:
                return

    def _thread_write(self, batch: list[_Waiting]) -> None:
        turns = [waiting.turn for waiting in batch if waiting.turn is not None]
        error = self._commit(turns) if turns else None
        alone = error is not None and not isinstance(error, StoreFull) and len(turns) > 1
        for waiting in batch:
            if waiting.turn is None:
                with suppress(StoreError):  # it is asked for again
                    self._store.checkpoint()
                waiting.settle(None)
            else:
                waiting.settle(self._commit([waiting.turn]) if alone else error)

    def _commit(self, turns: list[Turn]) -> StoreError | None:
        """As `_try`, but wait for another program that has the file locked."""
        deadline_s = time.monotonic() + BUSY_TIMEOUT_S
        error = self._try(turns)
        while isinstance(error, StoreBusy) and time.monotonic() < deadline_s:
            time.sleep(LOCK_PATIENCE_S)
            error = self._try(turns)
        return error

    def _try(self, turns: list[Turn]) -> StoreError | None:
        """The error, if any, as a value: it belongs to the awaiting callers, and the thread must go on."""
        try:
            self._store.commit(turns)
        except StoreError as error:
            return error
        except Exception as error:  # noqa: BLE001
            return StoreError(f"a turn could not be recorded: {type(error).__name__}: {error}")
        return None
