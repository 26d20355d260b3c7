"""The turn files of all workers, as the control process reads them: its own where it has one, others read-only.

A session never moves, so a rollout's turns are all in its worker's file. It never writes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from turngate.proxy.store.errors import StoreMissing
from turngate.proxy.store.layout import StoreFolder
from turngate.proxy.store.records import RolloutRecord, Seal
from turngate.proxy.store.turnstore import TurnCounts, TurnStore
from turngate.proxy.turns import Turn


class TurnFiles:
    """Safe to share between threads. `own` are open already and stay their owner's to close."""

    def __init__(self, folder: StoreFolder, own: Mapping[int, TurnStore]) -> None:
        self._folder = folder
        self._own = dict(own)
        self._others: dict[int, TurnStore] = {}
        self._lock = threading.Lock()

    def turns(self, record: RolloutRecord) -> list[Turn]:
        """The turns of a rollout by `seq`.

        Raises:
            StoreDamaged: they cannot be read.
        """
        store = self._of(record.worker)
        return [] if store is None else store.turns(record.id)

    def seal(self, worker: int, rollout: str) -> Seal:
        """What a rollout's turns are now, read from its worker's file.

        Raises:
            StoreMissing: the worker has no file.
        """
        store = self._of(worker)
        if store is None:
            raise StoreMissing(f"there is no {self._folder.turns(worker)}")
        return store.seal(rollout)

    def counts_of(self, records: Iterable[RolloutRecord]) -> dict[str, TurnCounts]:
        """Counts of each rollout's turns; zeros for those without any."""
        found: dict[str, TurnCounts] = {}
        for record in records:
            store = self._of(record.worker)
            found[record.id] = TurnCounts() if store is None else store.counts(record.id)
        return found

    def counts(self, worker: int) -> TurnCounts:
        """Counts of all turns of a worker; summed from its file where that is not our own."""
        store = self._of(worker)
        return TurnCounts() if store is None else store.counts()

    def workers(self) -> list[int]:
        """Workers that have a turn file."""
        return [int(path.stem.partition("-")[2]) for path in self._folder.all_turns()]

    def close(self) -> None:
        """Close what was opened here."""
        with self._lock:
            for store in self._others.values():
                store.close()
            self._others.clear()

    def _of(self, worker: int) -> TurnStore | None:
        if worker in self._own:
            return self._own[worker]
        with self._lock:
            path = self._folder.turns(worker)
            if worker not in self._others and path.exists():
                self._others[worker] = TurnStore(path, readonly=True)
            return self._others.get(worker)
