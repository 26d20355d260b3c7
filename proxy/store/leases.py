"""Leases of whole groups to a trainer, and what became of them: provisional until a checkpoint is durable.

Every lease has an epoch that only grows. Groups of an expired lease, or acknowledged after the step that training
resumes from, are leased again under a higher epoch, and the earlier holder's words no longer count. So in the lineage
of the final checkpoint each group has one fate.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence

from turngate.proxy.ids import uuid7
from turngate.proxy.rows import Row
from turngate.proxy.store.codec import row_digest
from turngate.proxy.store.errors import Conflict, NotFound, StaleLease
from turngate.proxy.store.groups import Groups
from turngate.proxy.store.records import GroupOutcome, LeaseGrant
from turngate.proxy.wire import AckLease, GroupAck, Heartbeat, NewLease


class Leases(Groups):
    """The control store's methods about leases, acknowledgements and checkpoints."""

    def lease(self, new: NewLease, now_ns: int) -> LeaseGrant:
        """Give up to `new.max_groups` ready groups to a trainer, the oldest first.

        Groups whose lease expired count as ready; the lease they were under is revoked whole.
        """
        with self._transaction() as db:
            self._close_due(db, now_ns)
            found = db.execute(
                "SELECT g.id, g.lease FROM groups g LEFT JOIN leases l ON l.id = g.lease WHERE g.policy = ? AND"
                " (g.state = 'ready' OR (g.state = 'leased' AND l.expires_at_ns <= ?))"
                " ORDER BY g.ready_at_ns, g.rowid LIMIT ?",
                (new.policy, now_ns, new.max_groups),
            ).fetchall()
            if not found:
                return LeaseGrant("", 0, ())
            for expired in {row["lease"] for row in found if row["lease"] is not None}:
                self._revoke(db, expired, "expired")
            lease = uuid7(now_ns)
            epoch = db.execute("SELECT coalesce(max(epoch), 0) + 1 FROM leases").fetchone()[0]
            db.execute(
                "INSERT INTO leases (id, policy, epoch, expires_at_ns, created_at_ns) VALUES (?, ?, ?, ?, ?)",
                (lease, new.policy, epoch, now_ns + round(new.ttl_s * 1e9), now_ns),
            )
            groups = tuple(row["id"] for row in found)
            for group in groups:
                db.execute("UPDATE groups SET state = 'leased', lease = ? WHERE id = ?", (lease, group))
        return LeaseGrant(lease, epoch, groups)

    def heartbeat(self, lease: str, beat: Heartbeat, now_ns: int) -> None:
        """Keep a lease for `beat.ttl_s` more seconds.

        Raises:
            NotFound: no such lease. StaleLease: its groups were given to another, or its epoch is not this one.
        """
        with self._transaction() as db:
            _live(db, lease, beat.epoch)
            db.execute("UPDATE leases SET expires_at_ns = ? WHERE id = ?", (now_ns + round(beat.ttl_s * 1e9), lease))

    def ack(self, lease: str, ack: AckLease, now_ns: int) -> None:
        """Record what became of some or all groups of a lease, in one transaction; repeating it changes nothing.

        Raises:
            NotFound: no such lease. StaleLease: its groups were given to another, or training was resumed since.
            Conflict: a group is not of this lease, or had another fate.
        """
        with self._transaction(to_disk=True) as db:
            _live(db, lease, ack.epoch)
            for told in ack.groups:
                row = db.execute("SELECT * FROM groups WHERE id = ?", (told.group,)).fetchone()
                if row is None or row["lease"] != lease:
                    raise Conflict(f"group {told.group} is not part of lease {lease}")
                if row["state"] != "leased":
                    if (row["state"], row["step"]) == (told.fate, ack.step):
                        continue
                    raise Conflict(f"group {told.group} was already {row['state']} at step {row['step']}")
                _record_fate(db, lease, ack, told, now_ns)

    def durable(self, policy: str, step: int, path: str, now_ns: int) -> None:
        """The checkpoint of `step` is on disk: acknowledgements up to it are final."""
        with self._transaction(to_disk=True) as db:
            db.execute("INSERT INTO checkpoints VALUES (?, ?, ?, ?, NULL)", (policy, step, path, now_ns))
            db.execute(
                "UPDATE acks SET durable = 1 WHERE step <= ? AND undone_at_ns IS NULL"
                " AND grp IN (SELECT id FROM groups WHERE policy = ?)",
                (step, policy),
            )

    def resume(self, policy: str, step: int, now_ns: int) -> int:
        """Training goes on from `step`: groups acknowledged later, and leased ones, are ready again; how many.

        Every lease of the policy is revoked, so a trainer of the abandoned lineage gets `StaleLease`.
        """
        with self._transaction(to_disk=True) as db:
            later = "policy = ? AND (state = 'leased' OR step > ?)"
            db.execute(
                "UPDATE acks SET undone_at_ns = ?, durable = 0 WHERE undone_at_ns IS NULL AND step > ?"
                " AND grp IN (SELECT id FROM groups WHERE policy = ?)",
                (now_ns, step, policy),
            )
            returned = db.execute(
                f"UPDATE groups SET state = 'ready', lease = NULL, step = NULL, cause = NULL WHERE {later}",
                (policy, step),
            ).rowcount
            db.execute("UPDATE leases SET revoked = 'resumed' WHERE policy = ? AND revoked IS NULL", (policy,))
            db.execute(
                "UPDATE checkpoints SET abandoned_at_ns = ? WHERE policy = ? AND step > ? AND abandoned_at_ns IS NULL",
                (now_ns, policy, step),
            )
        return returned

    def close_groups(self, policy: str, cause: str) -> int:
        """Training is over: groups without a fate are dropped for `cause`, their leases revoked; how many."""
        with self._transaction(to_disk=True) as db:
            db.execute("UPDATE leases SET revoked = ? WHERE policy = ? AND revoked IS NULL", (cause, policy))
            return db.execute(
                "UPDATE groups SET state = 'dropped', cause = ?, lease = NULL"
                " WHERE policy = ? AND state IN ('open', 'ready', 'leased')",
                (cause, policy),
            ).rowcount

    def last_durable(self, policy: str) -> tuple[int, str] | None:
        """(step, path) of the newest checkpoint of the current lineage."""
        row = self._one(
            "SELECT step, path FROM checkpoints WHERE policy = ? AND abandoned_at_ns IS NULL"
            " ORDER BY step DESC, rowid DESC LIMIT 1",
            policy,
        )
        return None if row is None else (row["step"], row["path"])

    def fates(self, policy: str) -> dict[str, tuple[str, int]]:
        """Group -> (fate, step) in the current lineage."""
        sql = "SELECT id, state, step FROM groups WHERE policy = ? AND step IS NOT NULL"
        return {row["id"]: (row["state"], row["step"]) for row in self._rows(sql, policy)}

    def outcomes(self, policy: str) -> list[GroupOutcome]:
        """Every group of a policy, oldest first, with how many acknowledgements of it stand."""
        sql = (
            "SELECT g.id, g.task, g.state, g.step, g.cause, count(a.grp) AS acks FROM groups g"
            " LEFT JOIN acks a ON a.grp = g.id AND a.undone_at_ns IS NULL"
            " WHERE g.policy = ? GROUP BY g.id ORDER BY g.created_at_ns, g.rowid"
        )
        return [GroupOutcome(**dict(row)) for row in self._rows(sql, policy)]

    def record_served(self, rows: Sequence[Row]) -> None:
        """Keep digests of rows handed to a trainer, so that `verify` can rebuild and compare them."""
        places: dict[str, int] = {}
        with self._transaction() as db:
            for row in rows:
                place = places.get(row.rollout, 0)
                places[row.rollout] = place + 1
                db.execute("INSERT OR IGNORE INTO served_rows VALUES (?, ?, ?)", (row.rollout, place, row_digest(row)))

    def served_rows(self, rollout: str) -> list[tuple[int, bytes]]:
        """(place among the rollout's rows, digest) of every row ever handed to a trainer."""
        sql = "SELECT place, digest FROM served_rows WHERE rollout = ? ORDER BY place"
        return [(row["place"], row["digest"]) for row in self._rows(sql, rollout)]

    def _revoke(self, db: sqlite3.Connection, lease: str, why: str) -> None:
        db.execute("UPDATE leases SET revoked = ? WHERE id = ?", (why, lease))
        db.execute("UPDATE groups SET state = 'ready', lease = NULL WHERE lease = ? AND state = 'leased'", (lease,))


def _live(db: sqlite3.Connection, lease: str, epoch: int) -> None:
    row = db.execute("SELECT * FROM leases WHERE id = ?", (lease,)).fetchone()
    if row is None:
        raise NotFound(f"no lease {lease} in this store")
    if row["revoked"] is not None or row["epoch"] != epoch:
        why = row["revoked"] or f"its epoch is {row['epoch']}, not {epoch}"
        raise StaleLease(f"lease {lease} is no longer valid ({why}); drop what came from it and lease again")


def _record_fate(db: sqlite3.Connection, lease: str, ack: AckLease, told: GroupAck, now_ns: int) -> None:
    db.execute(
        "UPDATE groups SET state = ?, cause = ?, step = ? WHERE id = ?", (told.fate, told.cause, ack.step, told.group)
    )
    db.execute(
        "INSERT INTO acks (grp, lease, epoch, step, fate, cause, rows, acked_at_ns) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (told.group, lease, ack.epoch, ack.step, told.fate, told.cause, json.dumps(told.rows), now_ns),
    )
