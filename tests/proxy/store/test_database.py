"""Migrations only go forward, one version a transaction, and a failed one leaves the file as it was."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest

from turngate.proxy.store.database import connect, migrate
from turngate.proxy.store.errors import SchemaTooNew, SchemaTooOld, StoreError

FIRST = "CREATE TABLE birds (name TEXT); INSERT INTO birds VALUES ('wren')"
SECOND = "ALTER TABLE birds ADD COLUMN eggs INTEGER NOT NULL DEFAULT 3"
BROKEN = "ALTER TABLE birds ADD COLUMN colour TEXT; INSERT INTO nothing VALUES (1)"


def version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def test_an_old_file_is_brought_up_to_date_with_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    old = connect(path)
    migrate(old, path, [FIRST])
    old.close()
    new = connect(path)
    migrate(new, path, [FIRST, SECOND])
    migrate(new, path, [FIRST, SECOND])
    assert version(new) == 2
    assert [tuple(row) for row in new.execute("SELECT * FROM birds")] == [("wren", 3)]
    with pytest.raises(SchemaTooNew):
        migrate(new, path, [FIRST])
    new.close()


def test_a_failed_migration_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    connection = connect(path)
    migrate(connection, path, [FIRST])
    with pytest.raises(StoreError):
        migrate(connection, path, [FIRST, BROKEN])
    assert version(connection) == 1
    assert [row.keys() for row in connection.execute("SELECT * FROM birds")] == [["name"]]
    connection.close()


def test_a_read_only_opening_does_not_migrate(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    owner = connect(path)
    migrate(owner, path, [FIRST])
    reader = connect(path, readonly=True)
    with pytest.raises(SchemaTooOld, match="start the gateway on this store once"):
        migrate(reader, path, [FIRST, SECOND], readonly=True)
    with pytest.raises(sqlite3.OperationalError):
        reader.execute("INSERT INTO birds VALUES ('robin')")
    reader.close()
    owner.close()


@pytest.mark.parametrize(("durability", "level"), [("normal", 1), ("full", 2)])
def test_durability_is_what_was_asked_for(tmp_path: Path, durability: str, level: int) -> None:
    connection = connect(tmp_path / "a.sqlite", durability=durability)  # type: ignore[arg-type]
    assert connection.execute("PRAGMA synchronous").fetchone()[0] == level
    assert connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
    connection.close()


def test_a_closed_store_in_a_folder_nobody_may_write_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "archive"
    folder.mkdir()
    path = folder / "a.sqlite"
    owner = connect(path)
    migrate(owner, path, [FIRST])
    owner.close()
    os.chmod(folder, 0o555)
    try:
        reader = connect(path, readonly=True)
        assert reader.execute("SELECT name FROM birds").fetchone()[0] == "wren"
        reader.close()
    finally:
        os.chmod(folder, 0o755)
