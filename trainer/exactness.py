"""Do the trainer and the engine agree? Recomputed against recorded log-probabilities of the same tokens.

Only rows whose every trained token came from one version, recomputed with exactly that version's weights, can be
compared: then any difference is an error of recording or of arithmetic, not of learning. Pure functions of tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Exactness:
    """Agreement over `tokens` tokens of `version`: mean of pi/mu, and the largest and mean absolute log difference."""

    version: int
    rows: int
    tokens: int
    ratio_mean: float
    max_abs_dlogp: float
    mean_abs_dlogp: float

    def metrics(self) -> dict[str, float]:
        """Flat metrics under `exact/`."""
        return {
            "exact/version": float(self.version),
            "exact/rows": float(self.rows),
            "exact/tokens": float(self.tokens),
            "exact/ratio_mean": self.ratio_mean,
            "exact/max_abs_dlogp": self.max_abs_dlogp,
            "exact/mean_abs_dlogp": self.mean_abs_dlogp,
        }


class ExactnessSums:
    """Sums of one step; `result` is None while no comparable token was seen."""

    def __init__(self, version: int) -> None:
        self.version = version
        self._rows = 0
        self._tokens = 0
        self._ratio = 0.0
        self._abs = 0.0
        self._max = 0.0

    def add(self, recomputed: Tensor, recorded: Tensor, *, rows: int) -> None:
        """Count `float[M]` recomputed and recorded log-probabilities of `rows` rows; the arithmetic is float64."""
        if recomputed.numel() == 0:
            return
        difference = recomputed.detach().double() - recorded.detach().double()
        self._rows += rows
        self._tokens += difference.numel()
        self._ratio += float(difference.exp().sum())
        self._abs += float(difference.abs().sum())
        self._max = max(self._max, float(difference.abs().max()))

    def __add__(self, other: ExactnessSums) -> ExactnessSums:
        """What two processes compared, together."""
        both = ExactnessSums(self.version)
        both._rows, both._tokens = self._rows + other._rows, self._tokens + other._tokens
        both._ratio, both._abs = self._ratio + other._ratio, self._abs + other._abs
        both._max = max(self._max, other._max)
        return both

    def result(self) -> Exactness | None:
        """The agreement so far."""
        if self._tokens == 0:
            return None
        n = self._tokens
        if not math.isfinite(self._ratio):
            return Exactness(self.version, self._rows, n, math.inf, math.inf, math.inf)
        return Exactness(self.version, self._rows, n, self._ratio / n, self._max, self._abs / n)
