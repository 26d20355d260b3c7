"""Taking finished work out of a store, whole groups at a time, and giving its space back.

What may still be trained stays: open rollouts, open, ready and leased groups, and settled groups until a checkpoint
that contains them is durable. It owns every file while it works, so it never runs beside a gateway. A prune that was
killed is completed by the next one.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from turngate.proxy.store import control_schema, turnstore
from turngate.proxy.store.database import OwnerLock, connect, migrate, sqlite_errors, transaction
from turngate.proxy.store.errors import StoreFull
from turngate.proxy.store.layout import StoreFolder

STATES = ("scored", "unscorable", "cancelled", "dropped", "zero_variance", "trained")
"""What can be pruned: rollouts without a group by their outcome, groups by what became of them."""

_BLOBS = ("tail_ids", "completion_ids", "logprobs", "top_ids", "top_logprobs", "body", "request", "response")
_SIZE = "+".join(f"coalesce(length({name}), 0)" for name in _BLOBS)
_PAGE = 500

_UNITS = """
    SELECT g.id AS grp, coalesce(g.id, r.id) AS unit, coalesce(g.state, r.outcome) AS state,
        max(r.finished_at_ns) AS finished_at_ns, json_group_array(r.id) AS rollouts
    FROM rollouts r LEFT JOIN groups g ON g.id = r.grp AND r.training
    GROUP BY g.id, CASE WHEN g.id IS NULL THEN r.id END
    HAVING sum(r.state = 'open') = 0 AND (
        g.id IS NULL OR (g.state = 'dropped' AND g.step IS NULL)
        OR (g.state IN ('trained', 'zero_variance', 'dropped') AND EXISTS (
            SELECT 1 FROM acks a WHERE a.grp = g.id AND a.durable AND a.undone_at_ns IS NULL)))
    ORDER BY finished_at_ns, unit
"""


@dataclass(frozen=True, slots=True)
class Unit:
    """What is pruned together: a group with all its rollouts, or one rollout without a group."""

    group: str | None
    state: str
    finished_at_ns: int
    rollouts: tuple[str, ...]
    turns: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class Choice:
    """Which units go: of these states, finished before `before_ns`, and the oldest until `max_bytes` are left."""

    states: frozenset[str]
    before_ns: int | None = None
    max_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Pruned:
    """What was taken out, or would be, and the size of the store's databases before and after."""

    units: tuple[Unit, ...]
    before_bytes: int
    after_bytes: int
    vacuumed: bool


class Pruner:
    """A store held for pruning. Use as a context manager.

    Raises:
        StoreMissing: there is none at `path`. StoreBusy: a gateway is running on it.
    """

    def __init__(self, path: Path) -> None:
        self._folder = StoreFolder.find(path)
        self._open = ExitStack()

    def __enter__(self) -> Pruner:
        with ExitStack() as stack:
            self._control = _own(stack, self._folder.control, control_schema.MIGRATIONS)
            files = self._folder.all_turns()
            self._turns = [(file, _own(stack, file, turnstore.MIGRATIONS)) for file in files]
            self._open = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def choose(self, choice: Choice) -> list[Unit]:
        """The units that go, oldest first."""
        chosen, left_bytes = [], self.size_bytes()
        for unit in self._units():
            if unit.state not in choice.states:
                continue
            if choice.before_ns is not None and unit.finished_at_ns >= choice.before_ns:
                continue
            if choice.max_bytes is not None and left_bytes <= choice.max_bytes:
                break
            chosen.append(unit)
            left_bytes -= unit.stored_bytes
        return chosen

    def prune(self, units: Sequence[Unit]) -> Pruned:
        """Take `units` out for good and give the space back.

        Raises:
            StoreError: a file could not be written; nothing that stays is harmed, and the next prune goes on.
        """
        before_bytes = self.size_bytes()
        self._finish_interrupted()
        self._forget([unit.group for unit in units if unit.group], [r for unit in units for r in unit.rollouts])
        self._finish_interrupted()
        vacuumed = self._vacuum()
        return Pruned(tuple(units), before_bytes, self.size_bytes(), vacuumed)

    def size_bytes(self) -> int:
        """Size of the store's databases, with what waits in their logs."""
        files = [self._folder.control, *(file for file, _ in self._turns)]
        paths = [path for file in files for path in (file, file.with_name(file.name + "-wal"))]
        return sum(path.stat().st_size for path in paths if path.exists())

    def _units(self) -> Iterator[Unit]:
        with sqlite_errors(self._folder.control):
            found = self._control.execute(_UNITS).fetchall()
        for row in found:
            rollouts = tuple(json.loads(row["rollouts"]))
            turns = stored = 0
            for file, db in self._turns:
                with sqlite_errors(file):
                    for rollout in rollouts:
                        sql = f"SELECT count(*), coalesce(sum({_SIZE}), 0) FROM turns WHERE rollout = ?"
                        counted, size = db.execute(sql, (rollout,)).fetchone()
                        turns, stored = turns + counted, stored + size
            yield Unit(row["grp"], row["state"], row["finished_at_ns"], rollouts, turns, stored)

    def _forget(self, groups: Sequence[str], rollouts: Sequence[str]) -> None:
        """Take them out of the control store, and note there whose turns are to follow: both or neither."""
        with transaction(self._control, self._folder.control) as db:
            db.execute("INSERT OR REPLACE INTO facts VALUES ('pruning', ?)", (json.dumps(list(rollouts)),))
            for table, column, ids in (
                ("rollouts", "id", rollouts),
                ("served_rows", "rollout", rollouts),
                ("groups", "id", groups),
                ("acks", "grp", groups),
            ):
                db.executemany(f"DELETE FROM {table} WHERE {column} = ?", [(one,) for one in ids])

    def _finish_interrupted(self) -> None:
        """Delete the turns of rollouts that are forgotten."""
        with sqlite_errors(self._folder.control):
            noted = self._control.execute("SELECT value FROM facts WHERE name = 'pruning'").fetchone()
        if noted is None:
            return
        rollouts = json.loads(noted["value"])
        for file, db in self._turns:
            for start in range(0, len(rollouts), _PAGE):
                with transaction(db, file):
                    ids = [(rollout,) for rollout in rollouts[start : start + _PAGE]]
                    db.executemany("DELETE FROM turns WHERE rollout = ?", ids)
            with transaction(db, file):
                db.execute(
                    "DELETE FROM blobs WHERE hash NOT IN (SELECT DISTINCT tools FROM turns WHERE tools IS NOT NULL)"
                )
        with transaction(self._control, self._folder.control) as db:
            db.execute("DELETE FROM facts WHERE name = 'pruning'")

    def _vacuum(self) -> bool:
        """Give free pages back; False when the disk has no room for the copy that this takes."""
        done = True
        for file, db in [(self._folder.control, self._control), *self._turns]:
            try:
                with sqlite_errors(file):
                    db.execute("VACUUM")
                    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            except StoreFull:
                done = False
        return done


@contextmanager
def _owned(path: Path, migrations: Sequence[str]) -> Iterator[sqlite3.Connection]:
    lock = OwnerLock(path)
    try:
        connection = connect(path, durability="full")
        try:
            migrate(connection, path, migrations)
            yield connection
        finally:
            connection.close()
    finally:
        lock.release()


def _own(stack: ExitStack, path: Path, migrations: Sequence[str]) -> sqlite3.Connection:
    return stack.enter_context(_owned(path, migrations))
