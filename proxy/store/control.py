"""The control store: what the control process alone decides, in one SQLite file with one owner.

Synchronous and fast (microseconds to a millisecond); safe to share between threads. The parts stand in one file a
noun; this joins them and adds the run's summary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

from turngate.proxy.store.adapters import Adapters
from turngate.proxy.store.database import Durability
from turngate.proxy.store.leases import Leases
from turngate.proxy.store.records import ControlSummary
from turngate.proxy.store.rollouts import Rollouts

LAST_REWARDS = 32


class ControlStore(Rollouts, Leases, Adapters):
    """The control process's store.

    Args:
        path: `control.sqlite`.
        run: the run's id, kept at the first opening; adapter names carry it.
        durability: "normal" survives a killed process, "full" also a power cut. Versions, acknowledgements and
            checkpoints are always on the disk before a call returns.
        readonly: for viewers and `verify`, while the owner may be writing.

    Raises:
        StoreBusy: another process owns it. StoreMissing: read-only, and no such file.
        SchemaTooNew, StoreDamaged: the file cannot be used.
    """

    def __init__(self, path: Path, *, run: str = "", durability: Durability = "normal", readonly: bool = False) -> None:
        super().__init__(path, durability=durability, readonly=readonly)
        if run and not readonly:
            with self._transaction() as db:
                db.execute("INSERT OR IGNORE INTO facts VALUES ('run', ?)", (run,))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def summary(self) -> ControlSummary:
        """Numbers for progress displays."""
        states = {row[0]: row[1] for row in self._rows("SELECT state, count(*) FROM rollouts GROUP BY state")}
        outcomes = self._rows("SELECT outcome, cause, count(*) FROM rollouts WHERE state = 'finished' GROUP BY 1, 2")
        last = self._rows(
            "SELECT reward FROM rollouts WHERE outcome = 'scored' ORDER BY finished_at_ns DESC LIMIT ?", LAST_REWARDS
        )
        return ControlSummary(
            open_rollouts=states.get("open", 0),
            finished_rollouts=states.get("finished", 0),
            scored_rollouts=sum(row[2] for row in outcomes if row[0] == "scored"),
            unscorable={row[1] or "unknown": row[2] for row in outcomes if row[0] == "unscorable"},
            groups=self.group_states(),
            reward_mean_last=sum(row[0] for row in last) / len(last) if last else None,
        )
