"""Durable turns: one SQLite file a gateway worker, written by it alone and readable by anyone meanwhile.

A turn is committed before the last event of its answer is sent, so a killed gateway loses no answer an agent saw.
Rows are only ever added: nothing here updates or deletes a turn.
"""

from __future__ import annotations

import sqlite3
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

from turngate.proxy.store import codec
from turngate.proxy.store.database import Durability, OwnerLock, connect, migrate, sqlite_errors, transaction
from turngate.proxy.store.errors import NotFound, StoreClosed, StoreDamaged
from turngate.proxy.store.records import Seal
from turngate.proxy.turns import Turn

MIGRATIONS = (
    """
    CREATE TABLE turns (
        id TEXT PRIMARY KEY, rollout TEXT NOT NULL, seq INTEGER NOT NULL, kind TEXT NOT NULL, base TEXT,
        base_tokens INTEGER NOT NULL, break_cause TEXT, label TEXT NOT NULL, label_reason TEXT NOT NULL,
        mode TEXT NOT NULL, engine TEXT NOT NULL, finish_reason TEXT NOT NULL, policy TEXT, version INTEGER,
        prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL, received_at_ns INTEGER NOT NULL,
        tail_ids BLOB NOT NULL, completion_ids BLOB NOT NULL, logprobs BLOB NOT NULL, top_k INTEGER, top_ids BLOB,
        top_logprobs BLOB, body BLOB NOT NULL, request BLOB NOT NULL, response BLOB NOT NULL, tools BLOB,
        digest BLOB NOT NULL
    );
    CREATE UNIQUE INDEX turns_by_rollout ON turns (rollout, seq);
    CREATE INDEX turns_summed ON turns
        (rollout, label, kind, break_cause, prompt_tokens, completion_tokens);
    CREATE TABLE blobs (hash BLOB PRIMARY KEY, data BLOB NOT NULL) WITHOUT ROWID
    """,
)
CHECKPOINT_BYTES = 4 << 20
"""So much is written between two checkpoints, about: SQLite itself makes one after 1,000 pages of 4,096 bytes."""

LOCK_PATIENCE_S = 0.01

_TURN_PAGES_BYTES = 16 << 10
"""What a turn writes besides its own values: pages of the table and of its indexes."""

_INSERT = f"INSERT INTO turns ({', '.join(codec.COLUMNS)}) VALUES ({', '.join('?' * len(codec.COLUMNS))})"
_SUMS = "SELECT rollout, kind, break_cause, count(*), sum(prompt_tokens), sum(completion_tokens) FROM turns"


@dataclass(slots=True)
class TurnCounts:
    """How many turns, of which kinds, and how many tokens they read and wrote."""

    turns: int = 0
    spliced: int = 0
    breaks: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, kind: str, cause: str | None, turns: int, prompt_tokens: int, completion_tokens: int) -> None:
        """Count `turns` turns of one kind and cause."""
        self.turns += turns
        self.spliced += turns if kind == "spliced" else 0
        if kind == "break":
            self.breaks[cause or "unknown"] += turns
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens

    def plus(self, other: TurnCounts) -> TurnCounts:
        """The sum of two counts."""
        return TurnCounts(
            self.turns + other.turns,
            self.spliced + other.spliced,
            self.breaks + other.breaks,
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
        )


class TurnSum(NamedTuple):
    """How many turns of a rollout share a label, kind and cause, and how many tokens they read and wrote."""

    rollout: str
    label: str
    kind: str
    break_cause: str | None
    turns: int
    prompt_tokens: int
    completion_tokens: int


class TurnStore:
    """The turns of one gateway worker. Safe to share between threads.

    Args:
        path: the worker's `turns-<k>.sqlite`.
        durability: "normal" survives a killed process, "full" also a power cut.
        readonly: for viewers and `verify`, while another process may be writing.

    Raises:
        StoreBusy: another process is writing this file. StoreMissing: read-only, and no such file.
        SchemaTooNew, StoreDamaged: the file cannot be used.
    """

    def __init__(self, path: Path, *, durability: Durability = "normal", readonly: bool = False) -> None:
        self.path = path
        self.syncs = durability == "full"
        """Whether each commit waits for the disk."""
        self._written_bytes = 0
        self._lock, self._read_lock = threading.Lock(), threading.Lock()
        self._owner = None if readonly else OwnerLock(path)
        self._writer: sqlite3.Connection | None = None
        try:
            if not readonly:
                self._writer = connect(path, durability=durability)
                migrate(self._writer, path, MIGRATIONS)
            self._reader: sqlite3.Connection | None = connect(path, readonly=True)
            migrate(self._reader, path, MIGRATIONS, readonly=True)
        except BaseException:
            self._release()
            raise
        self._tools: dict[bytes, Any] = {}
        self._kept: set[bytes] = set()
        self._counts = TurnCounts() if readonly else self._summed()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def commit(self, turns: Sequence[Turn]) -> None:
        """Write `turns` in one transaction; when this returns they survive a kill.

        Raises:
            Conflict: a turn's id, or its place in its rollout, is taken. StoreFull: no space; nothing was written.
        """
        packed = [codec.pack(turn) for turn in turns]
        with self._lock:
            if self._writer is None:
                raise StoreClosed(f"{self.path} is closed or read-only")
            with transaction(self._writer, self.path) as connection:
                for row in packed:
                    if row.tools_json is not None and row.tools_hash not in self._kept:
                        blob = (row.tools_hash, codec.squeeze(row.tools_json))
                        connection.execute("INSERT OR IGNORE INTO blobs VALUES (?, ?)", blob)
                connection.executemany(_INSERT, [row.values for row in packed])
            self._written_bytes += sum(row.size_bytes + _TURN_PAGES_BYTES for row in packed)
            self._kept.update(row.tools_hash for row in packed if row.tools_hash is not None)
            for turn in turns:
                self._counts.add(turn.kind, turn.break_cause, 1, turn.prompt_tokens, len(turn.completion_ids))

    def wait_for_nobody(self) -> None:
        """From here on no commit waits: not for the disk, because whoever commits asks for checkpoints (`checkpoint`),
        and for another program that has the file locked `LOCK_PATIENCE_S` at most, before it raises `StoreBusy`.
        """
        with self._lock, sqlite_errors(self.path):
            if self._writer is not None:
                self._writer.execute("PRAGMA wal_autocheckpoint=0")
                self._writer.execute(f"PRAGMA busy_timeout={round(LOCK_PATIENCE_S * 1000)}")

    @property
    def checkpoint_due(self) -> bool:
        """Whether enough was written since the last checkpoint."""
        return self._written_bytes >= CHECKPOINT_BYTES

    def checkpoint(self) -> None:
        """Move what was committed from the log into the file; waits for the disk.

        The first write after it syncs the log's head, so that one is made here: the version, which stays what it is.
        """
        with self._lock, sqlite_errors(self.path):
            self._written_bytes = 0
            if self._writer is not None:
                self._writer.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
                self._writer.execute(f"PRAGMA user_version={len(MIGRATIONS)}")

    def turns(self, rollout: str) -> list[Turn]:
        """The turns of a rollout by `seq`; empty when it has none."""
        return [self._turn(row) for row in self._read("SELECT * FROM turns WHERE rollout = ? ORDER BY seq", rollout)]

    def turn(self, turn: str) -> Turn:
        """One turn.

        Raises:
            NotFound: no such turn in this file.
        """
        rows = self._read("SELECT * FROM turns WHERE id = ?", turn)
        if not rows:
            raise NotFound(f"no turn {turn} in {self.path.name}")
        return self._turn(rows[0])

    def digests(self, rollout: str) -> list[tuple[str, bytes]]:
        """(turn id, digest taken when it was committed) of a rollout's turns, by `seq`."""
        rows = self._read("SELECT id, digest FROM turns WHERE rollout = ? ORDER BY seq", rollout)
        return [(row["id"], row["digest"]) for row in rows]

    def rollouts(self) -> Iterator[str]:
        """Ids of all rollouts with turns, in order of id (which is order of creation)."""
        last = ""
        while page := self._read("SELECT DISTINCT rollout FROM turns WHERE rollout > ? ORDER BY 1 LIMIT 1000", last):
            yield from (row["rollout"] for row in page)
            last = page[-1]["rollout"]

    def counts(self, rollout: str | None = None) -> TurnCounts:
        """Counts of one rollout's turns, or of all."""
        if rollout is not None:
            return self.counts_of([rollout])[rollout]
        return self._summed() if self._writer is None else self._counts.plus(TurnCounts())

    def counts_of(self, rollouts: Iterable[str]) -> dict[str, TurnCounts]:
        """Counts of each rollout's turns; zeros for those without any."""
        sums = {rollout: TurnCounts() for rollout in rollouts}
        for rollout, counts in sums.items():
            for row in self._read(f"{_SUMS} WHERE rollout = ? GROUP BY kind, break_cause", rollout):
                counts.add(*row[1:])
        return sums

    def sums(self) -> list[TurnSum]:
        """All turns counted by rollout, label, kind and cause, from an index: no token is read."""
        sql = (
            "SELECT rollout, label, kind, break_cause, count(*), sum(prompt_tokens), sum(completion_tokens) FROM turns"
        )
        return [TurnSum(*row) for row in self._read(f"{sql} GROUP BY rollout, label, kind, break_cause")]

    def last_received_ns(self, rollout: str) -> int | None:
        """When the request of a rollout's last turn came (UTC ns); None when it has none."""
        sql = "SELECT received_at_ns FROM turns WHERE rollout = ? ORDER BY seq DESC LIMIT 1"
        return next((row[0] for row in self._read(sql, rollout)), None)

    def seal(self, rollout: str) -> Seal:
        """What a rollout's turns are now, to be kept when it finishes."""
        digests = self.digests(rollout)
        return Seal(len(digests), codec.seal_digest(digest for _, digest in digests))

    def data_version(self) -> int:
        """A number that changes when something was committed since this store was last asked."""
        return int(self._read("PRAGMA data_version")[0][0])

    def check_file(self) -> list[str]:
        """What SQLite itself finds wrong with the file; empty when nothing is."""
        return [row[0] for row in self._read("PRAGMA quick_check(20)") if row[0] != "ok"]

    def close(self) -> None:
        """Close the file. Everything committed is in it."""
        with self._lock, self._read_lock:
            self._release()

    def _summed(self) -> TurnCounts:
        counts = TurnCounts()
        for row in self._read(f"{_SUMS} GROUP BY kind, break_cause"):
            counts.add(*row[1:])
        return counts

    def _read(self, sql: str, *values: Any) -> list[sqlite3.Row]:
        with self._read_lock, sqlite_errors(self.path):
            if self._reader is None:
                raise StoreClosed(f"{self.path} is closed")
            return self._reader.execute(sql, values).fetchall()

    def _turn(self, row: sqlite3.Row) -> Turn:
        try:
            return codec.unpack(dict(row), self._tools_of)
        except (ValueError, KeyError, TypeError) as error:
            raise StoreDamaged(f"turn {row['id']} in {self.path.name} cannot be read: {error}") from error

    def _tools_of(self, key: bytes) -> Any:
        if key not in self._tools:
            rows = self._read("SELECT data FROM blobs WHERE hash = ?", key)
            if not rows:
                raise KeyError(f"tool list {key.hex()} is missing")
            self._tools[key] = codec.loads(codec.expand(rows[0]["data"]))
        return self._tools[key]

    def _release(self) -> None:
        for connection in (getattr(self, "_reader", None), self._writer):
            if connection is not None:
                connection.close()
        self._reader = self._writer = None
        if self._owner is not None:
            self._owner.release()
