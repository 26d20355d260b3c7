"""What fine-tuning does to single tokens: the mean loss of each id that a good share of the rows has.

The mean over a row hides a token that the model will hardly ever write, such as the marker that opens a tool call: one
of a hundred, at 20 nats. Fed from the losses of the steps themselves; it must never ask for another forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from turngate.trainer.sft_rows import SftRow
from turngate.trainer.untrained_rows import MANY

LEAST_COUNT = 4
"""Ids that occur less often are not looked at: their mean is a chance."""

GOOD_SHARE = 0.25
"""Nor are ids of a smaller share of the rows: what a policy seldom has to write stops few rollouts."""

LISTED = 5

ALARMING_NATS = math.log(MANY + 1)
"""Above it a token is written less than once in twenty times that the demonstrations have it, as with `MANY` twins."""


@dataclass(frozen=True, slots=True)
class HardToken:
    """One id: how often the rows have it, in how many of them, and its mean loss in nats at first and at last.

    `twins`: how many other tokens have the same row of the output head (`untrained_rows`).
    """

    token: str
    id: int
    count: int
    rows: int
    loss_first: float | None
    loss_last: float
    twins: int = 0

    def as_json(self) -> dict[str, Any]:
        """For sft.json; losses rounded, for people compare them."""
        first = None if self.loss_first is None else round(self.loss_first, 3)
        return {**asdict(self), "loss_first": first, "loss_last": round(self.loss_last, 3)}


class TokenLosses:
    """Sums of losses by step and id.

    Args:
        rows: everything that is learnt.
        steps: how many optimizer steps there will be.
        rows_per_step: rows of each.
    """

    def __init__(self, rows: Sequence[SftRow], steps: int, rows_per_step: int) -> None:
        learnt = [np.array([label for label in row.labels[1:] if label >= 0], dtype=np.int64) for row in rows]
        ids, counts = np.unique(np.concatenate(learnt), return_counts=True)
        _, found_in = np.unique(np.concatenate([np.unique(one) for one in learnt]), return_counts=True)
        common = (counts >= LEAST_COUNT) & (found_in >= GOOD_SHARE * len(rows))
        self.ids: npt.NDArray[np.int64] = ids[common]
        self._counts, self._rows = counts[common], found_in[common]
        self._steps = steps
        self._window = max(1, min(steps // 2, math.ceil(len(rows) / rows_per_step)))
        self._sums: dict[int, tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]] = {}

    def add(self, step: int, ids: npt.NDArray[np.int64], losses: npt.NDArray[np.float32]) -> None:
        """Take in learnt tokens of step `step`, which counts from 0. `ids`: int64[T]; `losses`: float32[T], in nats."""
        if not len(self.ids):
            return
        place = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        known = self.ids[place] == ids
        size = len(self.ids)
        sums, counts = self._sums.get(step, (np.zeros(size), np.zeros(size, dtype=np.int64)))
        sums = sums + np.bincount(place[known], weights=losses[known], minlength=size)
        self._sums[step] = (sums, counts + np.bincount(place[known], minlength=size))

    def hardest_loss(self, step: int) -> float | None:
        """The largest mean loss of an id in step `step`; None when the step had none of them."""
        means = self._means([step])
        return None if np.isnan(means).all() else float(np.nanmax(means))

    def hardest(self, text: Callable[[int], str], twins: Mapping[int, int] | None = None) -> list[HardToken]:
        """The ids that are the most improbable at last, at most `LISTED`. `twins`: of each id, where they are known.

        First and last are the means over the first and the last epoch, or half of the steps where that is less.
        """
        first, last = self._means(range(self._window)), self._means(range(self._steps - self._window, self._steps))
        order = [int(place) for place in np.argsort(-last, kind="stable") if not math.isnan(last[place])]
        return [
            HardToken(
                text(int(self.ids[place])),
                int(self.ids[place]),
                int(self._counts[place]),
                int(self._rows[place]),
                None if math.isnan(first[place]) else float(first[place]),
                float(last[place]),
                (twins or {}).get(int(self.ids[place]), 0),
            )
            for place in order[:LISTED]
        ]

    def _means(self, steps: Sequence[int]) -> npt.NDArray[np.float64]:
        """float64[I]: mean loss of each id in these steps; nan where they have none."""
        found = [self._sums[step] for step in steps if step in self._sums]
        if not found:
            return np.full(len(self.ids), np.nan)
        counts = np.sum([one[1] for one in found], axis=0)
        means = np.full(len(self.ids), np.nan)
        np.divide(np.sum([one[0] for one in found], axis=0), counts, out=means, where=counts > 0)
        return means


def fine_tuning_alarm(hardest: Sequence[HardToken]) -> str:
    """What to say of tokens that the adapter will hardly ever write and could; empty when there are none."""
    bad = [one for one in hardest if one.loss_last > ALARMING_NATS and one.twins < MANY]
    if not bad:
        return ""
    worst, *more = bad
    text = (
        f"fine-tuning: the adapter gives {worst.token!r} a probability of {_percent(worst.loss_last)} where the "
        f"demonstrations have it ({worst.rows} rows)"
    )
    if more:
        text += ", " + ", ".join(f"{one.token!r} {_percent(one.loss_last)}" for one in more)
    return f"{text}: the policy will hardly ever write it; train longer (epochs) or at a higher learning rate"


def _percent(loss: float) -> str:
    return f"{100 * math.exp(-loss):.2g} %"
