"""Small leased groups and rows made by hand, for tests that need no model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from turngate.proxy import wire
from turngate.proxy.rows import Row
from turngate.trainer.planner import PlannedRow
from turngate.trainer.rows import GroupRows, TrainRow, ready_group


def wire_row(rollout: str, prompt: Sequence[int], completion: Sequence[int], versions: Sequence[int] | int = 0) -> Row:
    """A row of a prompt and a sampled completion; log-probs are -0.1, -0.2, ... in order."""
    ids = np.asarray([*prompt, *completion], dtype=np.int32)
    mask = np.arange(len(ids)) >= len(prompt)
    logprobs = np.where(mask, -0.1 * (np.arange(len(ids)) - len(prompt) + 1), 0.0).astype(np.float32)
    spread = np.zeros(len(completion), np.int32) + np.asarray(versions, dtype=np.int32)
    return Row(rollout, (f"turn-{rollout}",), ids, mask, logprobs, np.concatenate([np.full(len(prompt), -1), spread]))


def rollout(
    name: str, reward: float | None, *rows: Row, outcome: str = "scored", cause: str | None = None
) -> wire.LeasedRollout:
    """A leased rollout."""
    return wire.LeasedRollout.model_validate(
        {
            "id": name,
            "outcome": outcome,
            "cause": cause,
            "reward": reward,
            "rewards": {},
            "version": 0,
            "rows": [wire.WireRow.pack(row).model_dump() for row in rows],
        }
    )


def group(name: str, *rollouts: wire.LeasedRollout) -> wire.LeasedGroup:
    """A leased group."""
    return wire.LeasedGroup(id=name, task=f"task of {name}", rollouts=list(rollouts))


def simple_group(name: str, rewards: Sequence[float], versions: Sequence[int] | int = 0, tokens: int = 4) -> GroupRows:
    """A ready group with one row a reward, all behind one prompt of 3 tokens."""
    made = [
        rollout(f"{name}-{i}", reward, wire_row(f"{name}-{i}", (1, 2, 3), range(10 + i, 10 + i + tokens), versions))
        for i, reward in enumerate(rewards)
    ]
    return ready_group(group(name, *made))


def rows_of(*groups: GroupRows) -> list[TrainRow]:
    """All rows of some groups."""
    return [row for one in groups for row in one.rows]


class RawTokens:
    """A bin that counts every token of every row: what is forwarded without prefix sharing."""

    def __init__(self, token_budget: int) -> None:
        self.token_budget = token_budget
        self.used_tokens = 0

    def fits(self, row: PlannedRow) -> bool:
        """Whether the raw length still fits."""
        return self.used_tokens + len(row.row.ids) <= self.token_budget

    def add(self, row: PlannedRow) -> None:
        """Count the row's length."""
        self.used_tokens += len(row.row.ids)
