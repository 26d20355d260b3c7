"""SQLite as the store uses it: connections, forward migrations, transactions, errors in our own words.

Kept apart so that the turn store and the control store differ only in their schemas. It never guesses: a file with
a newer schema is refused, and a second writer of one file is refused by a lock that a killed process gives up.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal

from turngate.proxy.store.errors import (
    Conflict,
    SchemaTooNew,
    SchemaTooOld,
    StoreBusy,
    StoreDamaged,
    StoreError,
    StoreFull,
    StoreMissing,
)

Durability = Literal["normal", "full"]

# What a quota (EDQUOT) and a limit on file sizes (EFBIG) look like: SQLite says "full" for ENOSPC alone.
_CANNOT_WRITE = frozenset({sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE})

BUSY_TIMEOUT_S = 30.0
JOURNAL_LIMIT_BYTES = 64 << 20


def connect(path: Path, *, durability: Durability = "normal", readonly: bool = False) -> sqlite3.Connection:
    """A connection in autocommit mode, usable from any thread (callers hold their own lock).

    Raises:
        StoreMissing: read-only, and there is no such file.
        StoreDamaged: the file is no SQLite database.
    """
    if readonly and not path.exists():
        raise StoreMissing(f"there is no {path}; has the gateway of this run been started?")
    mode = _readonly_mode(path) if readonly else "mode=rwc"
    with sqlite_errors(path):
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?{mode}",
            uri=True,
            timeout=BUSY_TIMEOUT_S,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            connection.row_factory = sqlite3.Row
            if not readonly:
                connection.execute("PRAGMA journal_mode=WAL")
                connection.execute(f"PRAGMA synchronous={'FULL' if durability == 'full' else 'NORMAL'}")
                connection.execute(f"PRAGMA journal_size_limit={JOURNAL_LIMIT_BYTES}")
                connection.execute("PRAGMA foreign_keys=ON")
            else:
                connection.execute("SELECT count(*) FROM sqlite_schema")
        except sqlite3.Error:
            connection.close()
            raise
    return connection


def migrate(connection: sqlite3.Connection, path: Path, migrations: Sequence[str], *, readonly: bool = False) -> None:
    """Bring the schema up to date: `migrations[v]` leads from version v to v + 1, each in its own transaction.

    Raises:
        SchemaTooNew: written by a later release. SchemaTooOld: read-only, and migrations are due.
    """
    with sqlite_errors(path):
        version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if version > len(migrations):
        raise SchemaTooNew(
            f"{path} has schema {version}, this turngate knows up to {len(migrations)}; use the release that wrote it, "
            "or a later one"
        )
    if version < len(migrations) and readonly:
        raise SchemaTooOld(
            f"{path} has schema {version}, this turngate reads {len(migrations)}; start the gateway on this store "
            "once, which brings it up to date"
        )
    for step in range(version, len(migrations)):
        with transaction(connection, path):
            for statement in migrations[step].split(";"):
                if statement.strip():
                    connection.execute(statement)
            connection.execute(f"PRAGMA user_version={step + 1}")


@contextmanager
def transaction(connection: sqlite3.Connection, path: Path) -> Iterator[sqlite3.Connection]:
    """One write transaction: committed when the block ends, rolled back when it raises."""
    with sqlite_errors(path):
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield connection
            connection.execute("COMMIT")
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")


@contextmanager
def sqlite_errors(path: Path) -> Iterator[None]:
    """Turn sqlite3's errors into the store's."""
    try:
        yield
    except sqlite3.Error as error:
        raise _translated(error, path) from error


def _translated(error: sqlite3.Error, path: Path) -> StoreError:
    extended = getattr(error, "sqlite_errorcode", 0)
    code = extended & 0xFF
    if code == sqlite3.SQLITE_FULL or extended in _CANNOT_WRITE:
        return StoreFull(f"no space left for {path}; free some, then go on: nothing half-written remains")
    if code == sqlite3.SQLITE_CONSTRAINT:
        return Conflict(f"{path} already holds this, or refuses it: {error}")
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return StoreDamaged(f"{path} cannot be read as a store: {error}")
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StoreBusy(f"{path} stayed locked by another program: {error}")
    return StoreError(f"{path}: {error}")


class OwnerLock:
    """An exclusive lock beside a database; the kernel gives it up when its process dies."""

    def __init__(self, path: Path) -> None:
        try:
            self._file: IO[bytes] = open(path.with_name(path.name + ".lock"), "ab")  # noqa: SIM115
        except OSError as error:
            raise StoreError(f"{path} cannot be owned: its lock beside it: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise StoreBusy(f"{path} is owned by another running gateway; stop it, or use another store") from error

    def release(self) -> None:
        """Let another process own the database."""
        self._file.close()


def _readonly_mode(path: Path) -> str:
    """`immutable` only where SQLite could not make its shared-memory file and needs none."""
    unwritable = not os.access(path.parent, os.W_OK)
    return "immutable=1" if unwritable and not path.with_name(path.name + "-wal").exists() else "mode=ro"
