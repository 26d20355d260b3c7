"""Adapter versions in the control store: allocated on the disk before anything is loaded, and never reused.

A version is a number of its policy; 0 is the base model. Its name carries the run, because engines cache by name.
"""

from __future__ import annotations

import sqlite3

from turngate.proxy.store.base import ControlBase
from turngate.proxy.store.errors import NotFound
from turngate.proxy.store.records import AdapterRecord, AdapterState


class Adapters(ControlBase):
    """The control store's methods about adapters."""

    def run_id(self) -> str:
        """The run this store belongs to; empty before it was told."""
        row = self._one("SELECT value FROM facts WHERE name = 'run'")
        return "" if row is None else str(row["value"])

    def allocate_version(self, policy: str, path: str, step: int, now_ns: int) -> AdapterRecord:
        """The next version of `policy`, state "loading", on the disk before this returns."""
        with self._transaction(to_disk=True) as db:
            version = db.execute("SELECT coalesce(max(version), 0) + 1 FROM adapters WHERE policy = ?", (policy,))
            number = int(version.fetchone()[0])
            name = f"{policy}-{self.run_id()}-v{number}"
            db.execute(
                "INSERT INTO adapters VALUES (?, ?, ?, ?, ?, 'loading', NULL, ?)",
                (policy, number, name, path, step, now_ns),
            )
        return self.adapter(policy, number)

    def set_adapter_state(
        self, policy: str, version: int, state: AdapterState, cause: str | None = None
    ) -> AdapterRecord:
        """Move a version to "live", "retired" or "failed".

        Raises:
            NotFound: no such version.
        """
        with self._transaction() as db:
            db.execute(
                "UPDATE adapters SET state = ?, cause = ? WHERE policy = ? AND version = ?",
                (state, cause, policy, version),
            )
        return self.adapter(policy, version)

    def adapter(self, policy: str, version: int) -> AdapterRecord:
        """One version.

        Raises:
            NotFound: no such version.
        """
        row = self._one("SELECT * FROM adapters WHERE policy = ? AND version = ?", policy, version)
        if row is None:
            raise NotFound(f"policy {policy} has no version {version}")
        return _record(row)

    def adapters(self, policy: str | None = None) -> list[AdapterRecord]:
        """All versions of a policy (or of all policies), oldest first."""
        rows = self._rows("SELECT * FROM adapters WHERE ?1 IS NULL OR policy = ?1 ORDER BY policy, version", policy)
        return [_record(row) for row in rows]

    def current_version(self, policy: str) -> int:
        """The highest live version; 0 (the base) when there is none."""
        sql = "SELECT coalesce(max(version), 0) AS version FROM adapters WHERE policy = ? AND state = 'live'"
        row = self._one(sql, policy)
        return 0 if row is None else int(row["version"])


def _record(row: sqlite3.Row) -> AdapterRecord:
    return AdapterRecord(**{key: row[key] for key in AdapterRecord.__slots__})
