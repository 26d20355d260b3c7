"""Groups in the control store: rollouts of one task that GRPO compares, closed once and then leased whole.

open -> ready -> leased -> trained | zero_variance | dropped; open -> dropped when too few survive. Which rollouts
belong to a group is fixed when it closes, so that every lease of it hands out the same ones.
"""

from __future__ import annotations

import sqlite3

from turngate.proxy.store.base import ControlBase
from turngate.proxy.store.errors import Conflict, Invalid, NotFound
from turngate.proxy.store.records import GroupRecord
from turngate.proxy.wire import NewRollout

MIN_SURVIVORS = 2  # GRPO's baseline is the mean of the others
TOO_FEW = "too_few_survivors"
STATES = ("open", "ready", "leased", "trained", "zero_variance", "dropped")


class Groups(ControlBase):
    """The control store's methods about groups."""

    def group(self, group: str) -> GroupRecord:
        """One group.

        Raises:
            NotFound: no training rollout has named it.
        """
        row = self._one("SELECT * FROM groups WHERE id = ?", group)
        if row is None:
            raise NotFound(f"no group {group} in this store")
        return GroupRecord(**{key: row[key] for key in GroupRecord.__slots__})

    def group_policies(self) -> list[str]:
        """The policies that have groups."""
        return [row[0] for row in self._rows("SELECT DISTINCT policy FROM groups ORDER BY policy")]

    def group_states(self) -> dict[str, int]:
        """How many groups are in each state; all states are named."""
        sums = {row[0]: row[1] for row in self._rows("SELECT state, count(*) FROM groups GROUP BY state")}
        return {state: sums.get(state, 0) for state in STATES}

    def _close_due(self, db: sqlite3.Connection, now_ns: int) -> int:
        due = db.execute("SELECT id FROM groups WHERE state = 'open' AND deadline_ns <= ?", (now_ns,)).fetchall()
        for row in due:
            self._settle_group(db, row["id"], now_ns)
        return len(due)

    def _join_group(self, db: sqlite3.Connection, new: NewRollout, policy: str, now_ns: int) -> None:
        row = db.execute("SELECT * FROM groups WHERE id = ?", (new.group,)).fetchone()
        if row is None:
            if new.group_size is None:
                raise Invalid(f"group {new.group} is new: its first rollout must say group_size")
            wait_ns = None if new.group_deadline_s is None else round(new.group_deadline_s * 1e9)
            db.execute(
                "INSERT INTO groups (id, task, policy, size, attempts, deadline_ns, created_at_ns)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    *(new.group, new.task, policy, new.group_size, new.group_attempts or new.group_size),
                    *(wait_ns and now_ns + wait_ns, now_ns),
                ),
            )
            return
        if row["state"] != "open":
            raise Conflict(f"group {new.group} is closed ({row['state']}); a late rollout cannot join it")
        if (row["task"], row["policy"]) != (new.task, policy):
            raise Conflict(
                f"group {new.group} is of task {row['task']} and policy {row['policy']}: one group, one task"
            )
        if new.group_size not in (None, row["size"]):
            raise Conflict(f"group {new.group} waits for {row['size']} rollouts, not {new.group_size}")

    def _settle_group(self, db: sqlite3.Connection, group: str, now_ns: int) -> None:
        """Close the group if `size` are scored, all its attempts have ended, or it is due; what is open is left out."""
        row = db.execute("SELECT * FROM groups WHERE id = ?", (group,)).fetchone()
        if row is None or row["state"] != "open":
            return
        finished, scored = db.execute(
            "SELECT count(*), coalesce(sum(outcome = 'scored'), 0) FROM rollouts"
            " WHERE grp = ? AND training AND state = 'finished' AND NOT replaced",
            (group,),
        ).fetchone()
        due = row["deadline_ns"] is not None and row["deadline_ns"] <= now_ns
        complete = scored >= row["size"] or finished >= (row["attempts"] or row["size"])
        if not complete and not due:
            return
        state, cause = ("ready", None) if scored >= MIN_SURVIVORS else ("dropped", TOO_FEW)
        db.execute(
            "UPDATE rollouts SET member = 1 WHERE grp = ? AND training AND state = 'finished' AND NOT replaced",
            (group,),
        )
        db.execute(
            "UPDATE groups SET state = ?, cause = ?, ready_at_ns = ? WHERE id = ?", (state, cause, now_ns, group)
        )
