"""What the control store's parts share: one connection, one lock, transactions, small queries.

`rollouts.py`, `groups.py`, `leases.py` and `adapters.py` each add the methods of one noun; `control.py` joins them.
No method reads a clock: time comes in as `now_ns` (UTC ns).
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from turngate.proxy.store.control_schema import MIGRATIONS
from turngate.proxy.store.database import Durability, OwnerLock, connect, migrate, sqlite_errors, transaction
from turngate.proxy.store.errors import StoreClosed


class ControlBase:
    """One owner's connection to `control.sqlite`; every method holds one lock, so threads may share it."""

    def __init__(self, path: Path, *, durability: Durability = "normal", readonly: bool = False) -> None:
        self.path = path
        self._durability = durability
        self._lock = threading.RLock()
        self._owner = None if readonly else OwnerLock(path)
        self._db: sqlite3.Connection | None = None
        try:
            self._db = connect(path, durability=durability, readonly=readonly)
            migrate(self._db, path, MIGRATIONS, readonly=readonly)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file; every finished call is in it."""
        with self._lock:
            if self._db is not None:
                self._db.close()
            self._db = None
            if self._owner is not None:
                self._owner.release()

    def data_version(self) -> int:
        """For read-only stores: a number that changes when the owner has written since it was last asked."""
        row = self._one("PRAGMA data_version")
        return 0 if row is None else int(row[0])

    def _connection(self) -> sqlite3.Connection:
        if self._db is None:
            raise StoreClosed(f"{self.path} is closed")
        return self._db

    @contextmanager
    def _transaction(self, *, to_disk: bool = False) -> Iterator[sqlite3.Connection]:
        """One write transaction; `to_disk` waits for the disk itself, for what must survive a power cut too."""
        with self._lock:
            db = self._connection()
            if to_disk and self._durability == "normal":
                db.execute("PRAGMA synchronous=FULL")
            try:
                with transaction(db, self.path):
                    yield db
            finally:
                if to_disk and self._durability == "normal":
                    db.execute("PRAGMA synchronous=NORMAL")

    def _rows(self, sql: str, *values: Any) -> list[sqlite3.Row]:
        with self._lock, sqlite_errors(self.path):
            return self._connection().execute(sql, values).fetchall()

    def _one(self, sql: str, *values: Any) -> sqlite3.Row | None:
        with self._lock, sqlite_errors(self.path):
            row: sqlite3.Row | None = self._connection().execute(sql, values).fetchone()
            return row
