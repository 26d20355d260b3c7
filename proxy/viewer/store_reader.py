"""The viewer's reads on a real store folder, live or finished.

Every connection is read-only. Turns are only ever added, so their counts are kept and only new rows are read.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from sqlite3 import Connection

from turngate.proxy.store.control import ControlStore
from turngate.proxy.store.database import connect, sqlite_errors
from turngate.proxy.store.layout import StoreFolder
from turngate.proxy.store.rollouts import RolloutFilter, RolloutRecord
from turngate.proxy.store.turnstore import TurnStore
from turngate.proxy.turns import Turn
from turngate.proxy.viewer.reader import TurnCount
from turngate.proxy.wire import AdapterInfo, RolloutInfo

_NEW_TURNS = (
    "SELECT rollout, label, kind, break_cause, count(*), sum(prompt_tokens), sum(completion_tokens), max(rowid)"
    " FROM turns WHERE rowid > ? GROUP BY 1, 2, 3, 4"
)
_ALL = 1 << 40

Key = tuple[str, str, str, str | None]


@dataclass(slots=True)
class _TurnFile:
    """One worker's turns: the store for whole turns, a connection for counting, and how far it has counted."""

    store: TurnStore
    connection: Connection
    counted_rowid: int = 0


@dataclass(slots=True)
class _Sums:
    """Running totals of one rollout."""

    turns: int = 0
    breaks: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(slots=True)
class _Counted:
    """Everything counted so far."""

    turns: Counter[Key] = field(default_factory=Counter)
    tokens: Counter[Key] = field(default_factory=Counter)
    rollouts: dict[str, _Sums] = field(default_factory=dict)


class StoreFolderReader:
    """A `StoreReader` over the store at `path`, or at `path/store` of a run folder.

    Raises:
        StoreError: there is no store, or it cannot be read; the message says which and what to do.
    """

    def __init__(self, path: Path) -> None:
        self._folder = StoreFolder.find(path)
        self._control = ControlStore(self._folder.control, readonly=True)
        self._control_watch = connect(self._folder.control, readonly=True)
        self._files: dict[Path, _TurnFile] = {}
        self._counted = _Counted()
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """The run's id."""
        return self._folder.run

    @property
    def tokenizer_file(self) -> Path | None:
        """`tokenizer.json` of the store, once the gateway has written it."""
        return self._folder.tokenizer if self._folder.tokenizer.exists() else None

    def state(self) -> Hashable:
        """SQLite's own change counters of every file."""
        with self._lock:
            files = self._open_files()
            watches = [self._control_watch, *(file.connection for file in files)]
            return tuple(_data_version(watch, self._folder.path) for watch in watches)

    def rollouts(self) -> Sequence[RolloutInfo]:
        """All rollouts with their turns counted."""
        records = self._control.rollouts(RolloutFilter(limit=_ALL))
        with self._lock:
            self._count()
            return [_info(record, self._counted.rollouts.get(record.id, _Sums())) for record in records]

    def turn_counts(self) -> Sequence[TurnCount]:
        """Turns by rollout, label, kind and cause."""
        with self._lock:
            self._count()
            tokens = self._counted.tokens
            return [TurnCount(*key, turns=turns, completion_tokens=tokens[key]) for key, turns in self._turn_items()]

    def adapters(self) -> Sequence[AdapterInfo]:
        """All adapter versions."""
        return self._control.adapters()

    def turns(self, rollout: str) -> Sequence[Turn]:
        """The turns of one rollout; a session never moves, so one file has them all."""
        with self._lock:
            files = self._open_files()
        for file in files:
            turns = file.store.turns(rollout)
            if turns:
                return turns
        return []

    def close(self) -> None:
        """Close every file."""
        with self._lock:
            for file in self._files.values():
                file.store.close()
                file.connection.close()
            self._files.clear()
        self._control_watch.close()
        self._control.close()

    def _turn_items(self) -> list[tuple[Key, int]]:
        return list(self._counted.turns.items())

    def _open_files(self) -> list[_TurnFile]:
        for path in self._folder.all_turns():
            if path not in self._files:
                self._files[path] = _TurnFile(TurnStore(path, readonly=True), connect(path, readonly=True))
        return list(self._files.values())

    def _count(self) -> None:
        counted = self._counted
        for file in self._open_files():
            with sqlite_errors(file.store.path):
                rows = file.connection.execute(_NEW_TURNS, (file.counted_rowid,)).fetchall()
            for rollout, label, kind, cause, turns, prompt_tokens, completion_tokens, rowid in rows:
                key = (rollout, label, kind, cause)
                counted.turns[key] += turns
                counted.tokens[key] += completion_tokens
                sums = counted.rollouts.setdefault(rollout, _Sums())
                sums.turns += turns
                sums.breaks += turns if kind == "break" else 0
                sums.prompt_tokens += prompt_tokens
                sums.completion_tokens += completion_tokens
                file.counted_rowid = max(file.counted_rowid, rowid)


def _data_version(connection: Connection, path: Path) -> int:
    with sqlite_errors(path):
        return int(connection.execute("PRAGMA data_version").fetchone()[0])


def _info(record: RolloutRecord, sums: _Sums) -> RolloutInfo:
    return RolloutInfo(
        id=record.id,
        task=record.new.task,
        group=record.new.group,
        harness=record.new.harness,
        policy=record.policy,
        version=record.version,
        state="open" if record.state == "open" else "finished",
        outcome=record.outcome,
        cause=record.cause,
        reward=record.reward,
        rewards=dict(record.rewards),
        metrics=dict(record.metrics),
        metadata=record.new.metadata,
        created_at_ns=record.created_at_ns,
        finished_at_ns=record.finished_at_ns,
        turns=sums.turns,
        breaks=sums.breaks,
        prompt_tokens=sums.prompt_tokens,
        completion_tokens=sums.completion_tokens,
    )
