"""Rows forwarded whole, side by side, padded on the right: for models whose layers are not all attention.

A recurrent or convolutional layer reads its row from left to right, so rows cannot share a prefix in one packed tree as
attention allows; padding after a row changes nothing before it. Nothing here may forward two rows as one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from turngate.trainer.planner import PlannedRow

UNTRAINED = -100


class WholeRows:
    """Stands where a tree attention would: nothing to prepare, each layer does what the model does by itself."""

    name = "none: rows whole, without a tree"


class RowBin:
    """A planner's bin that counts what is forwarded: every row as long as the longest."""

    def __init__(self, token_budget: int) -> None:
        self.token_budget = token_budget
        self._rows = 0
        self._longest = 0

    def fits(self, row: PlannedRow) -> bool:
        """Whether the padded rows stay within the budget with `row` added."""
        return (self._rows + 1) * max(self._longest, len(row.row.ids)) <= self.token_budget

    def add(self, row: PlannedRow) -> None:
        """Add a row."""
        self._rows += 1
        self._longest = max(self._longest, len(row.row.ids))


@dataclass(frozen=True, slots=True)
class Padded:
    """One forward of one rank: B rows padded to T tokens; loss terms are those of a packed tree.

    `tensors`: `input_ids`, `attention_mask`, `position_ids`, `shift_labels` are `int64[B, T]`; of the M trained tokens
    `token_index: int64[M]` is where each is predicted in the flattened forward, `segment_id: int64[M]` its row,
    `old_log_probs` and `advantages` are `float32[M]`.
    """

    rows: tuple[PlannedRow, ...]
    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, rows: Sequence[PlannedRow], device: torch.device) -> Padded:
        """Pad `rows` on `device`."""
        longest = max(len(row.row.ids) for row in rows)
        shape = (len(rows), longest)
        ids, seen = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
        labels = torch.full(shape, UNTRAINED, dtype=torch.long)
        index, segment, recorded, advantages = list[int](), list[int](), list[float](), list[float]()
        for at, planned in enumerate(rows):
            row = planned.row
            ids[at, : len(row.ids)] = torch.as_tensor(row.ids.astype("int64"))
            seen[at, : len(row.ids)] = 1
            for position in planned.mask.nonzero()[0].tolist():
                if position == 0:
                    continue  # a row's first token is predicted by nothing
                labels[at, position - 1] = int(row.ids[position])
                index.append(at * longest + position - 1)
                segment.append(at)
                recorded.append(float(row.logprobs[position]))
                advantages.append(float(row.advantage))
        tensors = {
            "input_ids": ids,
            "attention_mask": seen,
            "position_ids": torch.arange(longest).expand(shape).contiguous(),
            "shift_labels": labels,
            "token_index": torch.tensor(index, dtype=torch.long),
            "segment_id": torch.tensor(segment, dtype=torch.long),
            "old_log_probs": torch.tensor(recorded, dtype=torch.float32),
            "advantages": torch.tensor(advantages, dtype=torch.float32),
        }
        return cls(tuple(rows), {name: tensor.to(device) for name, tensor in tensors.items()})

    @property
    def forwarded_tokens(self) -> int:
        """Tokens in the forward, padding included."""
        return int(self.tensors["input_ids"].numel())

    def inputs(self, attention: Any) -> dict[str, Any]:
        """The model's arguments."""
        return {name: self.tensors[name] for name in ("input_ids", "attention_mask", "position_ids", "shift_labels")}
