"""The viewer's reads on a real store folder, live or finished.

Every connection is read-only. A worker that joins later brings a new file, so files are looked for at every refresh.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

from turngate.proxy.rollout_info import rollout_info
from turngate.proxy.store.control import ControlStore
from turngate.proxy.store.layout import StoreFolder
from turngate.proxy.store.records import RolloutFilter, RolloutRecord
from turngate.proxy.store.turnstore import TurnStore
from turngate.proxy.turns import Turn
from turngate.proxy.viewer.reader import TurnCount
from turngate.proxy.wire import AdapterInfo, RolloutInfo

_ALL = 1 << 40


@dataclass(slots=True)
class _Sums:
    """The turns of one rollout, counted."""

    turns: int = 0
    breaks: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class StoreFolderReader:
    """A `StoreReader` over the store at `path`, or at `path/store` of a run folder.

    Raises:
        StoreError: there is no store, or it cannot be read; the message says which and what to do.
    """

    def __init__(self, path: Path) -> None:
        self._folder = StoreFolder.find(path)
        self._control = ControlStore(self._folder.control, readonly=True)
        self._stores: dict[Path, TurnStore] = {}
        self._lock = threading.Lock()
        self._turn_stores()

    @property
    def name(self) -> str:
        """The run's id."""
        return self._folder.run

    @property
    def tokenizer_file(self) -> Path | None:
        """`tokenizer.json` of the store, once the gateway has written it."""
        return self._folder.tokenizer if self._folder.tokenizer.exists() else None

    def state(self) -> Hashable:
        """SQLite's own change counter of every file."""
        return (self._control.data_version(), *(store.data_version() for store in self._turn_stores()))

    def rollouts(self) -> Sequence[RolloutInfo]:
        """All rollouts with their turns counted."""
        records = self._control.rollouts(RolloutFilter(limit=_ALL))
        sums: dict[str, _Sums] = defaultdict(_Sums)
        for store in self._turn_stores():
            for some in store.sums():
                one = sums[some.rollout]
                one.turns += some.turns
                one.breaks += some.turns if some.kind == "break" else 0
                one.prompt_tokens += some.prompt_tokens
                one.completion_tokens += some.completion_tokens
        return [_info(record, sums.get(record.id, _Sums())) for record in records]

    def turn_counts(self) -> Sequence[TurnCount]:
        """Turns by rollout, label, kind and cause."""
        return [
            TurnCount(some.rollout, some.label, some.kind, some.break_cause, some.turns, some.completion_tokens)
            for store in self._turn_stores()
            for some in store.sums()
        ]

    def adapters(self) -> Sequence[AdapterInfo]:
        """All adapter versions."""
        return self._control.adapters()

    def turns(self, rollout: str) -> Sequence[Turn]:
        """The turns of one rollout; a session never moves, so one file has them all."""
        return next((turns for store in self._turn_stores() if (turns := store.turns(rollout))), [])

    def close(self) -> None:
        """Close every file."""
        with self._lock:
            for store in self._stores.values():
                store.close()
            self._stores.clear()
        self._control.close()

    def _turn_stores(self) -> list[TurnStore]:
        with self._lock:
            for path in self._folder.all_turns():
                if path not in self._stores:
                    self._stores[path] = TurnStore(path, readonly=True)
            return list(self._stores.values())


def _info(record: RolloutRecord, sums: _Sums) -> RolloutInfo:
    return rollout_info(
        record,
        turns=sums.turns,
        breaks=sums.breaks,
        prompt_tokens=sums.prompt_tokens,
        completion_tokens=sums.completion_tokens,
    )
