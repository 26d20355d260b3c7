"""Group commit: many sessions await, one thread writes, each transaction takes whatever is queued.

The event loop never waits for the disk, and a commit costs one transaction however many turns share it. A turn whose
`commit` was cancelled is still written: what was sampled is recorded.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from contextlib import suppress
from dataclasses import dataclass

from turngate.proxy.store.errors import StoreClosed, StoreError, StoreFull
from turngate.proxy.store.turnstore import TurnStore
from turngate.proxy.turns import Turn

MAX_BATCH = 256  # bounds how long the first turn of a batch waits for the others to be packed


@dataclass(frozen=True, slots=True)
class _Waiting:
    turn: Turn
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[None]

    def settle(self, error: Exception | None) -> None:
        """Wake the awaiting caller from the writer's thread; its loop may be gone at shutdown."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._set, error)

    def _set(self, error: Exception | None) -> None:
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


class TurnWriter:
    """Commits turns of many sessions to one `TurnStore`. The store stays the caller's to close, after this."""

    def __init__(self, store: TurnStore) -> None:
        self._store = store
        self._queue: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="turn-writer", daemon=True)
        self._thread.start()

    async def commit(self, turn: Turn) -> None:
        """Return once the transaction that holds `turn` is committed.

        Raises:
            StoreFull, Conflict, StoreClosed, StoreError: the turn is not in the store.
        """
        if self._closed:
            raise StoreClosed("the turn writer is closed; no more turns can be recorded")
        loop = asyncio.get_running_loop()
        waiting = _Waiting(turn, loop, loop.create_future())
        self._queue.put(waiting)
        await waiting.done

    async def close(self) -> None:
        """Write everything queued, then stop the thread."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        while (first := self._queue.get()) is not None:
            batch, last = [first], False
            while len(batch) < MAX_BATCH and not self._queue.empty():
                following = self._queue.get()
                if following is None:
                    last = True
                    break
                batch.append(following)
            self._write(batch)
            if last:
                return

    def _write(self, batch: list[_Waiting]) -> None:
        error = self._commit([waiting.turn for waiting in batch])
        alone = error is not None and not isinstance(error, StoreFull) and len(batch) > 1
        for waiting in batch:
            waiting.settle(self._commit([waiting.turn]) if alone else error)

    def _commit(self, turns: list[Turn]) -> Exception | None:
        """The error, if any, as a value: it belongs to the awaiting callers, and the thread must go on."""
        try:
            self._store.commit(turns)
        except StoreError as error:
            return error
        except Exception as error:  # noqa: BLE001
            return StoreError(f"a turn could not be recorded: {type(error).__name__}: {error}")
        return None
