"""Rollouts in the control store: created with a secret's hash, finished once, found by filters.

A secret itself is never stored. Finishing is idempotent: a runner that retries after a lost answer changes nothing.
"""

from __future__ import annotations

import json
import sqlite3

from turngate.proxy.store.errors import Conflict, Invalid, NotFound
from turngate.proxy.store.groups import Groups
from turngate.proxy.store.records import RolloutFilter as RolloutFilter
from turngate.proxy.store.records import RolloutRecord as RolloutRecord
from turngate.proxy.store.records import Seal as Seal
from turngate.proxy.wire import FinishRollout, NewRollout

_FILTERS = {
    "state": "state = ?",
    "outcome": "outcome = ?",
    "task": "task = ?",
    "harness": "harness = ?",
    "group": "grp = ?",
    "policy": "policy = ?",
    "version": "version = ?",
    "min_reward": "reward >= ?",
    "max_reward": "reward <= ?",
    "training": "training = ?",
}


class Rollouts(Groups):
    """The control store's methods about rollouts."""

    def create_rollout(
        self,
        rollout: str,
        secret_sha256: bytes,
        new: NewRollout,
        policy: str,
        version: int,
        now_ns: int,
        *,
        worker: int = 0,
    ) -> RolloutRecord:
        """Record a new session (of the secret only its SHA-256), and its group when it is the first to name it.

        Raises:
            Conflict: the id or secret is taken, or the group is closed or of another task or policy.
            Invalid: the first rollout of a group did not say its size.
        """
        with self._transaction() as db:
            if new.group is not None and new.training:
                self._join_group(db, new, policy, now_ns)
            db.execute(
                "INSERT INTO rollouts (id, secret, task, grp, harness, policy, version, training, new, created_at_ns,"
                " worker) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(rollout, secret_sha256, new.task, new.group, new.harness, policy, version, new.training),
                    *(new.model_dump_json(), now_ns, worker),
                ),
            )
        return self.rollout(rollout)

    def finish_rollout(
        self, rollout: str, result: FinishRollout, now_ns: int, *, seal: Seal | None = None
    ) -> RolloutRecord:
        """Close a rollout with its result; its group may become ready or dropped by it.

        The same reward, rewards, outcome and cause again change nothing; metrics are those of the first time.

        Raises:
            NotFound: no such rollout. Conflict: it was finished with a different result.
            Invalid: scored without a reward, or not scored without a cause.
        """
        check_result(rollout, result)
        told = (result.outcome, result.cause, result.reward, result.rewards)
        with self._transaction() as db:
            row = db.execute("SELECT * FROM rollouts WHERE id = ?", (rollout,)).fetchone()
            if row is None:
                raise NotFound(f"no rollout {rollout} in this store")
            if row["state"] == "finished":
                if (row["outcome"], row["cause"], row["reward"], json.loads(row["rewards"])) == told:
                    return _record(row)
                raise Conflict(f"rollout {rollout} was finished as {row['outcome']} with reward {row['reward']}")
            db.execute(
                "UPDATE rollouts SET state = 'finished', outcome = ?, cause = ?, reward = ?, rewards = ?, metrics = ?,"
                " finished_at_ns = ?, sealed_turns = ?, seal = ?, replaced = ? WHERE id = ?",
                (
                    *(result.outcome, result.cause, result.reward, json.dumps(result.rewards)),
                    *(json.dumps(result.metrics), max(now_ns, row["created_at_ns"])),
                    *(seal and seal.turns, seal and seal.digest),
                    *(result.replaced, rollout),
                ),
            )
            if row["grp"] is not None and row["training"]:
                self._settle_group(db, row["grp"], now_ns)
        return self.rollout(rollout)

    def rollout(self, rollout: str) -> RolloutRecord:
        """One rollout.

        Raises:
            NotFound: no such rollout.
        """
        row = self._one("SELECT * FROM rollouts WHERE id = ?", rollout)
        if row is None:
            raise NotFound(f"no rollout {rollout} in this store")
        return _record(row)

    def rollout_by_secret(self, secret_sha256: bytes) -> RolloutRecord:
        """The rollout whose secret has this SHA-256.

        Raises:
            NotFound: no such secret.
        """
        row = self._one("SELECT * FROM rollouts WHERE secret = ?", secret_sha256)
        if row is None:
            raise NotFound("no session has this secret")
        return _record(row)

    def rollouts(self, where: RolloutFilter | None = None) -> list[RolloutRecord]:
        """Rollouts that match, newest first unless asked otherwise, at most `where.limit`."""
        where = where or RolloutFilter()
        filters = _FILTERS | {"after": "id > ?" if where.oldest_first else "id < ?"}
        wanted = {key: getattr(where, key) for key in filters if getattr(where, key) is not None}
        clause = " AND ".join(filters[key] for key in wanted) or "1"
        order = "ASC" if where.oldest_first else "DESC"
        sql = f"SELECT * FROM rollouts WHERE {clause} ORDER BY id {order} LIMIT ?"
        return [_record(row) for row in self._rows(sql, *wanted.values(), where.limit)]

    def open_rollouts(self) -> list[RolloutRecord]:
        """Every rollout not finished, oldest first: what a restarted gateway goes on with."""
        return [_record(row) for row in self._rows("SELECT * FROM rollouts WHERE state = 'open' ORDER BY id")]

    def open_by_worker(self) -> dict[int, int]:
        """How many rollouts each worker has open."""
        rows = self._rows("SELECT worker, count(*) FROM rollouts WHERE state = 'open' GROUP BY worker")
        return {row[0]: row[1] for row in rows}

    def group_rollouts(self, group: str) -> list[RolloutRecord]:
        """The rollouts a closed group is scored from, in order of creation: fixed when it became ready."""
        sql = "SELECT * FROM rollouts WHERE grp = ? AND member ORDER BY id"
        return [_record(row) for row in self._rows(sql, group)]


def check_result(rollout: str, result: FinishRollout) -> None:
    """Refuse a result that says too little.

    Raises:
        Invalid: scored without a reward, or not scored without a cause.
    """
    if result.outcome == "scored" and result.reward is None:
        raise Invalid(f"rollout {rollout}: a scored rollout needs a finite reward; without one it is unscorable")
    if result.outcome != "scored" and not result.cause:
        raise Invalid(f"rollout {rollout}: an outcome of {result.outcome} needs a cause")


def _record(row: sqlite3.Row) -> RolloutRecord:
    return RolloutRecord(
        id=row["id"],
        new=NewRollout.model_validate_json(row["new"]),
        policy=row["policy"],
        version=row["version"],
        state=row["state"],
        outcome=row["outcome"],
        cause=row["cause"],
        reward=row["reward"],
        rewards=json.loads(row["rewards"]),
        metrics=json.loads(row["metrics"]),
        created_at_ns=row["created_at_ns"],
        finished_at_ns=row["finished_at_ns"],
        member=bool(row["member"]),
        sealed_turns=row["sealed_turns"],
        seal=row["seal"],
        replaced=bool(row["replaced"]),
        worker=row["worker"],
    )
