"""One optimizer step as a plan: whole groups, split into micro-batches by token budget, stale tokens masked.

A plan is made when its groups are all there, so nothing ever waits for a half-filled micro-batch, and the loss can be
the token mean over the step. Pure: rows in, values out; it never splits a group over two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from turngate.trainer.rows import GroupRows, TrainRow


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """A row in a plan. `mask: bool[N]` is its mask without the `stale_tokens` too old to train.

    `sampled_by` is the one version that sampled every trained token, or None when several did.
    """

    row: TrainRow
    mask: NDArray[np.bool_]
    stale_tokens: int
    sampled_by: int | None

    @property
    def tokens(self) -> int:
        """How many tokens of the row are trained in this step."""
        return int(self.mask.sum())


@dataclass(frozen=True, slots=True)
class Staleness:
    """How many versions the trained tokens lag behind the trainer, and how many tokens were too old to train.

    `dropped_tokens` are those masked in the step's groups and those of groups that were dropped whole.
    """

    mean: float
    max: int
    dropped_tokens: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One optimizer step: `micro[m][rank]` are the rows one rank forwards in micro-batch m, never empty.

    `tokens` is the number of trained tokens in the whole step, the denominator of the loss. `version` is the version
    whose weights the trainer holds when the step begins.
    """

    step: int
    version: int
    groups: tuple[GroupRows, ...]
    micro: tuple[tuple[tuple[PlannedRow, ...], ...], ...]
    tokens: int
    staleness: Staleness

    @property
    def rows(self) -> list[PlannedRow]:
        """All rows of the step in micro-batch order, fillers included (they train no token)."""
        return [row for ranks in self.micro for rows in ranks for row in rows]

    @property
    def rewards(self) -> list[float]:
        """Rewards of every scored rollout of the step."""
        return [reward for group in self.groups for reward in group.rewards]


class Bin(Protocol):
    """One forward pass being filled; counts tokens its own way (a prefix tree counts shared ones once)."""

    def fits(self, row: PlannedRow) -> bool:
        """Whether `row` can be added within the budget."""

    def add(self, row: PlannedRow) -> None:
        """Add `row`; the first row always may."""


def mask_stale(row: TrainRow, *, version: int, max_staleness: int) -> PlannedRow:
    """`row` without the tokens sampled more than `max_staleness` versions ago; the rest of the row stays."""
    fresh = row.mask & (version - row.versions <= max_staleness)
    sampled = np.unique(row.versions[fresh])
    only = int(sampled[0]) if len(sampled) == 1 else None
    return PlannedRow(row, fresh, int(row.mask.sum() - fresh.sum()), only)


def usable(group: GroupRows, *, version: int, max_staleness: int) -> bool:
    """Whether at least one token of the group is fresh enough to train at `version`."""
    return any(mask_stale(row, version=version, max_staleness=max_staleness).tokens for row in group.rows)


def plan_step(
    groups: Sequence[GroupRows],
    *,
    step: int,
    version: int,
    max_staleness: int,
    new_bin: Callable[[], Bin],
    ranks: int = 1,
    given_up: int = 0,
) -> StepPlan:
    """Plan one step over whole groups.

    Rows are placed group by group, first fit, so rows of one group share a forward (and their prefix) where the budget
    allows. With several ranks the bins are dealt out in order and the last micro-batch is completed with rows that
    train nothing, because a rank without a forward would stall the others.

    Args:
        groups: groups whose fate is `trained`.
        step: number of the step being planned, from 1.
        version: the version whose weights the trainer holds now.
        max_staleness: tokens older than this many versions are masked.
        new_bin: makes an empty bin with the run's token budget.
        ranks: data-parallel processes.
        given_up: tokens of groups passed over for this step because all of theirs were too old.
    """
    planned = [mask_stale(row, version=version, max_staleness=max_staleness) for group in groups for row in group.rows]
    live = [row for row in planned if row.tokens]
    micro = _deal(_pack(live, new_bin), ranks)
    lag = np.concatenate([version - row.row.versions[row.mask] for row in live]) if live else np.zeros(0, np.int32)
    staleness = Staleness(
        mean=float(np.maximum(lag, 0).mean()) if len(lag) else 0.0,
        max=int(max(lag.max(), 0)) if len(lag) else 0,
        dropped_tokens=given_up + sum(row.stale_tokens for row in planned),
    )
    return StepPlan(step, version, tuple(groups), micro, sum(row.tokens for row in live), staleness)


def _pack(rows: Sequence[PlannedRow], new_bin: Callable[[], Bin]) -> list[tuple[PlannedRow, ...]]:
    bins: list[tuple[Bin, list[PlannedRow]]] = []
    for row in rows:
        place = next((place for place in reversed(bins) if place[0].fits(row)), None)
        if place is None:
            place = (new_bin(), [])
            bins.append(place)
        place[0].add(row)
        place[1].append(row)
    return [tuple(held) for _, held in bins]


def _deal(bins: list[tuple[PlannedRow, ...]], ranks: int) -> tuple[tuple[tuple[PlannedRow, ...], ...], ...]:
    if not bins:
        return ()
    while len(bins) % ranks:
        shortest = min((row for rows in bins for row in rows), key=lambda row: len(row.row.ids))
        bins.append((PlannedRow(shortest.row, np.zeros_like(shortest.mask), 0, None),))
    return tuple(tuple(bins[start : start + ranks]) for start in range(0, len(bins), ranks))
