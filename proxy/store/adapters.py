"""Adapter versions in the control store: allocated on the disk before anything is loaded, and never reused.

A version is a number of its policy; 0 is the base model. Its name carries the run, because engines cache by name.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from typing import Literal

from turngate.proxy.store.base import ControlBase
from turngate.proxy.store.errors import NotFound
from turngate.proxy.wire import AdapterInfo

AdapterState = Literal["loading", "live", "retired", "failed"]


class Adapters(ControlBase):
    """The control store's methods about adapters."""

    def run_id(self) -> str:
        """The run this store belongs to; empty before it was told."""
        row = self._one("SELECT value FROM facts WHERE name = 'run'")
        return "" if row is None else str(row["value"])

    def allocate_version(self, policy: str, path: str, step: int, now_ns: int) -> tuple[int, str]:
        """(version, name) of the next version of `policy`, state "loading", on the disk before this returns."""
        with self._transaction(to_disk=True) as db:
            version = db.execute("SELECT coalesce(max(version), 0) + 1 FROM adapters WHERE policy = ?", (policy,))
            number = int(version.fetchone()[0])
            name = f"{policy}-{self.run_id()}-v{number}"
            db.execute(
                "INSERT INTO adapters VALUES (?, ?, ?, ?, ?, 'loading', NULL, ?)",
                (policy, number, name, path, step, now_ns),
            )
        return number, name

    def set_adapter_state(
        self, policy: str, version: int, state: AdapterState, cause: str | None = None
    ) -> AdapterInfo:
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

    def adapter(self, policy: str, version: int) -> AdapterInfo:
        """One version.

        Raises:
            NotFound: no such version.
        """
        row = self._one("SELECT * FROM adapters WHERE policy = ? AND version = ?", policy, version)
        if row is None:
            raise NotFound(f"policy {policy} has no version {version}")
        return _info(row, self.pinned(policy))

    def adapters(self, policy: str | None = None) -> list[AdapterInfo]:
        """All versions of a policy (or of all policies), oldest first."""
        rows = self._rows("SELECT * FROM adapters WHERE ?1 IS NULL OR policy = ?1 ORDER BY policy, version", policy)
        pinned = {name: self.pinned(name) for name in {row["policy"] for row in rows}}
        return [_info(row, pinned[row["policy"]]) for row in rows]

    def set_current(self, policy: str, version: int) -> None:
        """Let new rollouts of `policy` have this version: the flip, seen by every process that reads this store."""
        with self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (f"current:{policy}", str(version)))

    def served(self) -> tuple[dict[str, int], dict[tuple[str, int], tuple[str, str]]]:
        """Current version by policy (once one was published) and (name, path) of live versions, of one moment."""
        sql = (
            "SELECT substr(name, 9) AS policy, CAST(value AS INTEGER) AS version, NULL AS name, NULL AS path FROM facts"
            " WHERE name LIKE 'current:%' UNION ALL"
            " SELECT policy, version, name, path FROM adapters WHERE state = 'live'"
        )
        current: dict[str, int] = {}
        live: dict[tuple[str, int], tuple[str, str]] = {}
        for row in self._rows(sql):
            if row["name"] is None:
                current[row["policy"]] = row["version"]
            else:
                live[row["policy"], row["version"]] = (row["name"], row["path"])
        return current, live

    def pinned(self, policy: str) -> dict[int, int]:
        """Open rollouts of `policy` by the version they are pinned to."""
        sql = "SELECT version, count(*) FROM rollouts WHERE state = 'open' AND policy = ? GROUP BY version"
        return {row[0]: row[1] for row in self._rows(sql, policy)}


def _info(row: sqlite3.Row, pinned: Mapping[int, int]) -> AdapterInfo:
    return AdapterInfo(**dict(row), sessions=pinned.get(row["version"], 0))
