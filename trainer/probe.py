"""Looking at one row with other weights than the current ones: an earlier adapter, or none.

The adapter's tensors are put in place, one forward runs without gradient, and the current ones come back whatever
happens. It never touches the optimizer or the base weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft import set_peft_model_state_dict
from torch import Tensor

from turngate.trainer.exactness import Exactness, ExactnessSums
from turngate.trainer.planner import PlannedRow

# Runs one row and gives (recomputed, recorded) log-probabilities of its trained tokens, `float[M]` each.
Score = Callable[[PlannedRow], tuple[Tensor, Tensor]]


class Snapshots:
    """The adapter's tensors of the newest versions, on the CPU, so that their rows can be recomputed later."""

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self._weights: dict[int, dict[str, Tensor]] = {}

    def add(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Remember a version; the oldest beyond `keep` is forgotten."""
        self._weights[version] = {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights.items()}
        for old in sorted(self._weights)[: -self.keep]:
            del self._weights[old]

    def get(self, version: int) -> Mapping[str, Tensor] | None:
        """The tensors of a version, if still remembered."""
        return self._weights.get(version)


@contextmanager
def wearing(model: Any, weights: Mapping[str, Tensor], current: Mapping[str, Tensor]) -> Iterator[None]:
    """`model` with the adapter `weights` inside the block, and with `current` again after it."""
    kept = {name: tensor.detach().clone() for name, tensor in current.items()}
    set_peft_model_state_dict(model, dict(weights))
    try:
        yield
    finally:
        set_peft_model_state_dict(model, kept)


def comparable(rows: Sequence[PlannedRow], snapshots: Snapshots) -> PlannedRow | None:
    """The shortest row whose one sampling version is still remembered, newest version first."""
    known = [row for row in rows if row.sampled_by is not None and snapshots.get(row.sampled_by) is not None]
    return min(known, key=lambda row: (-(row.sampled_by or 0), len(row.row.ids)), default=None)


@torch.no_grad()
def exactness_of(
    row: PlannedRow, model: Any, current: Mapping[str, Tensor], snapshots: Snapshots, score: Score
) -> Exactness | None:
    """Compare one row's recorded log-probabilities with those of the version that sampled it."""
    weights = snapshots.get(row.sampled_by) if row.sampled_by is not None else None
    if weights is None or row.sampled_by is None:
        return None
    sums = ExactnessSums(row.sampled_by)
    with wearing(model, weights, current):
        recomputed, recorded = score(row)
    sums.add(recomputed, recorded, rows=1)
    return sums.result()


@torch.no_grad()
def adapter_effect(row: PlannedRow, model: Any, score: Score) -> float:
    """Largest absolute difference of log-probabilities with and without the adapter; 0 while it is the identity."""
    with_adapter, _ = score(row)
    with model.disable_adapter():
        without, _ = score(row)
    return float((with_adapter - without).abs().max()) if len(with_adapter) else 0.0
