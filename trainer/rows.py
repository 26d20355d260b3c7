"""Leased groups to training rows: advantages, and which rollouts of a group are trained at all.

Here stands the rule that a rollout's rows are admitted or dropped together, and that only scored rollouts form the
baseline. Pure: no I/O, no clock; it never changes a token id or a recorded log-probability.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turngate.proxy.rows import Row
from turngate.proxy.wire import GroupFate, LeasedGroup, LeasedRollout
from turngate.trainer.settings import Credit

ADVANTAGE_EPS = 1e-4
MIN_SCORED = 2


@dataclass(frozen=True, slots=True)
class TrainRow:
    """One token path with its advantage.

    `ids: int32[N]`; `mask: bool[N]`, True where the policy sampled the token and it is trained here;
    `logprobs: float32[N]`, natural log as recorded by the engine where `mask`, else 0; `versions: int32[N]`, the policy
    version that sampled the token where `mask`, else -1. `advantage` holds for every token of the row.
    """

    group: str
    rollout: str
    turns: tuple[str, ...]
    ids: NDArray[np.int32]
    mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    advantage: float

    @property
    def tokens(self) -> int:
        """How many tokens of the row are trained."""
        return int(self.mask.sum())


@dataclass(frozen=True, slots=True)
class GroupRows:
    """A leased group made ready: its rows when `fate` is `trained`, or why it is not trained.

    `rewards` are those of the scored rollouts; `uncounted` says by cause how many rollouts stand outside the baseline,
    `unadmitted` by cause how many are in the baseline but not trained.
    """

    id: str
    task: str
    fate: GroupFate
    cause: str | None
    rewards: tuple[float, ...]
    rows: tuple[TrainRow, ...]
    uncounted: Mapping[str, int]
    unadmitted: Mapping[str, int]


def advantages(rewards: Sequence[float], eps: float = ADVANTAGE_EPS) -> NDArray[np.float64]:
    """`(r - mean) / (std + eps)` as `float64[G]`, std over the group itself (no Bessel correction).

    Group-relative advantage of GRPO: Shao et al. 2024, "DeepSeekMath", arXiv 2402.03300, section 4.1.2.
    """
    values = np.asarray(rewards, dtype=np.float64)
    centred = values - values.mean()
    return np.asarray(centred / (values.std() + eps), dtype=np.float64)


def row_advantage(advantage: float, rows: int, credit: Credit) -> float:
    """What each token of each of a rollout's `rows` rows is credited with.

    A rollout has several where its history was rewritten (a break, a compaction) or a sub-agent is trained too; every
    sampled token is in exactly one. With `each`, a token's credit does not depend on how many there are: under a token
    mean the rollout counts as if it were one row. With `split`, the rows' credits add up to the advantage.
    """
    return advantage if credit == "each" else advantage / rows


def ready_group(group: LeasedGroup, *, max_row_tokens: int | None = None, credit: Credit = "each") -> GroupRows:
    """Decide a group's fate and build its rows.

    Args:
        group: as leased from the gateway.
        credit: see `row_advantage`.
        max_row_tokens: a rollout with a longer row is not trained (it still counts in the baseline); None: no limit.
    """
    scored = [rollout for rollout in group.rollouts if rollout.outcome == "scored" and rollout.reward is not None]
    uncounted = Counter(r.cause or r.outcome for r in group.rollouts if r.outcome != "scored" or r.reward is None)
    rewards = tuple(float(rollout.reward or 0.0) for rollout in scored)
    if len(scored) < MIN_SCORED:
        return _untrained(group, "dropped", f"{len(scored)} scored rollouts, {MIN_SCORED} needed", rewards, uncounted)
    if max(rewards) == min(rewards):
        return _untrained(group, "zero_variance", None, rewards, uncounted)
    rows: list[TrainRow] = []
    unadmitted: Counter[str] = Counter()
    for rollout, advantage in zip(scored, advantages(rewards), strict=True):
        unpacked = [row.unpack() for row in rollout.rows]
        why = _not_admitted(unpacked, max_row_tokens)
        if why is not None:
            unadmitted[why] += 1
            continue
        share = row_advantage(float(advantage), len(unpacked), credit)
        rows.extend(_train_row(group, rollout, row, share) for row in unpacked)
    if not rows:
        return _untrained(group, "dropped", "no rollout could be admitted", rewards, uncounted, unadmitted)
    return GroupRows(group.id, group.task, "trained", None, rewards, tuple(rows), dict(uncounted), dict(unadmitted))


def _untrained(
    group: LeasedGroup,
    fate: GroupFate,
    cause: str | None,
    rewards: tuple[float, ...],
    uncounted: Mapping[str, int],
    unadmitted: Mapping[str, int] | None = None,
) -> GroupRows:
    return GroupRows(group.id, group.task, fate, cause, rewards, (), dict(uncounted), dict(unadmitted or {}))


def _train_row(group: LeasedGroup, rollout: LeasedRollout, row: Row, advantage: float) -> TrainRow:
    return TrainRow(group.id, rollout.id, row.turns, row.ids, row.mask, row.logprobs, row.versions, advantage)


def _not_admitted(rows: Sequence[Row], max_row_tokens: int | None) -> str | None:
    """Why none of a rollout's rows may be trained, or None when all may."""
    if not rows:
        return "no trained tokens"
    for row in rows:
        if not len(row.ids) == len(row.mask) == len(row.logprobs) == len(row.versions):
            return "arrays of different length"
        if len(row.mask) and row.mask[0]:
            return "sampled token without a prompt"
        if not np.isfinite(row.logprobs[row.mask]).all() or (row.logprobs[row.mask] > 1e-3).any():
            return "log-probability not finite or above 0"
        if (row.versions[row.mask] < 0).any():
            return "token without a version"
        if max_row_tokens is not None and len(row.ids) > max_row_tokens:
            return "longer than token_budget"
    return None
