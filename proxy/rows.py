"""Rows: root-to-leaf token paths with a loss mask, built from a rollout's turns.

The trainer, `verify` and the tests' outside tap all speak rows, so the rule for which token is trained where stands
here once: a turn's completion belongs to the first leaf (by `seq`) whose path contains it whole.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turngate.proxy.labels import settled
from turngate.proxy.turns import BrokenTree, FloatArray, IntArray, Turn, by_id, path_ids

TRAINED_LABELS: frozenset[str] = frozenset({"main"})
SHAPED = "shaped:"
"""Flags of turns sampled from a distribution changed by a grammar, a bias or a ban: never trained, because no trainer
can recompute it."""


@dataclass(frozen=True, slots=True)
class Row:
    """One token path to train on.

    `ids: int32[N]`; `mask: bool[N]`, True where the token was sampled by the policy and is trained in this row;
    `logprobs: float32[N]`, recorded log-probability where `mask`, else 0; `versions: int32[N]`, the policy version
    that sampled the token where `mask`, else -1. Of a demonstration's tokens the log-prob is NaN and the version -1:
    they can be imitated, and no trainer can take them for sampled ones. `turns` are the turns whose completions are
    trained here, in order.
    """

    rollout: str
    turns: tuple[str, ...]
    ids: IntArray
    mask: NDArray[np.bool_]
    logprobs: FloatArray
    versions: IntArray


def build_rows(turns: Sequence[Turn], trained_labels: Collection[str] = TRAINED_LABELS) -> list[Row]:
    """Rows of one rollout; every sampled token of a trained label is in exactly one of them.

    Args:
        turns: all turns of one rollout, any order.
        trained_labels: labels whose completions are trained; paths without any such token give no row.

    Raises:
        BrokenTree: a turn's base is missing or too short, or its log-probs are not one a token.
    """
    known = by_id(settled(turns))
    ordered = sorted(known.values(), key=lambda turn: turn.seq)
    continued = {t.base for t in ordered if t.base in known and t.base_tokens == known[t.base].path_tokens}
    rows: list[Row] = []
    done: set[str] = set()
    for leaf in ordered:
        if leaf.id in continued:
            continue
        ids = path_ids(known, leaf)
        mask = np.zeros(len(ids), dtype=np.bool_)
        logprobs = np.zeros(len(ids), dtype=np.float32)
        versions = np.full(len(ids), -1, dtype=np.int32)
        trained: list[str] = []
        for turn in _whole_ancestors(known, leaf):
            if turn.id in done or not is_trained(turn, trained_labels):
                continue
            if len(turn.logprobs) != len(turn.completion_ids):
                raise BrokenTree(
                    f"turn {turn.id} has {len(turn.completion_ids)} tokens, {len(turn.logprobs)} log-probs"
                )
            start = turn.prompt_tokens
            mask[start : turn.path_tokens] = True
            logprobs[start : turn.path_tokens] = turn.logprobs
            for span in turn.spans:
                versions[start + span.start : start + span.end] = span.version
            done.add(turn.id)
            trained.append(turn.id)
        if trained:
            rows.append(Row(leaf.rollout, tuple(trained[::-1]), ids, mask, logprobs, versions))
    return rows


def is_trained(turn: Turn, trained_labels: Collection[str] = TRAINED_LABELS) -> bool:
    """Whether a turn's completion belongs to some row's loss."""
    shaped = any(flag.startswith(SHAPED) for flag in turn.flags)
    return turn.label in trained_labels and not shaped and len(turn.completion_ids) > 0


def _whole_ancestors(known: dict[str, Turn], leaf: Turn) -> list[Turn]:
    """`leaf` and every turn whose whole path lies on the leaf's path, nearest first."""
    chain, reach, turn = [], leaf.path_tokens, leaf
    while True:
        if turn.path_tokens <= reach:
            chain.append(turn)
        reach = min(reach, turn.base_tokens)
        if turn.base is None or reach == 0:
            return chain
        turn = known[turn.base]
