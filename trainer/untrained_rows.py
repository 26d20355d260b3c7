"""Tokens that a base model never learnt to write: thousands of rows of its output head are one and the same.

A LoRA of the layers moves hidden states and leaves the head alone, so it gives all tokens with the same row the same
probability, however long it is trained. Found before the first step; it must never need a forward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

NEAR = 0.02
"""Rows count as the same within this share of their length: hidden states are not long enough to tell them apart."""

MANY = 19
"""With so many others, a token is written less than once in twenty times that it should be."""

_ROWS_AT_ONCE = 8192


def twins_of(head: Tensor, ids: Tensor) -> list[int]:
    """How many other tokens have the same row of the head as each of `ids`.

    Args:
        head: float[V, H], the weight of the output head.
        ids: int64[I].
    """
    mine = head.detach()[ids.to(head.device)].float()
    lengths = mine.norm(dim=1)
    found = torch.zeros(len(mine), dtype=torch.int64, device=head.device)
    for start in range(0, len(head), _ROWS_AT_ONCE):
        rows = head.detach()[start : start + _ROWS_AT_ONCE]
        found += (torch.cdist(rows.float(), mine) <= NEAR * lengths).sum(dim=0)
    return [count - 1 for count in found.tolist()]


def untrained_alarm(twins: Mapping[str, int]) -> str:
    """What to say of tokens that no adapter of the layers can teach (`text -> twins_of`); empty when there are none."""
    bad = {token: count for token, count in twins.items() if count >= MANY}
    if not bad:
        return ""
    told = ", ".join(
        f"{token!r} {1 / (count + 1):.2g} ({math.log(count + 1):.1f} nats)" for token, count in bad.items()
    )
    return (
        f"untrained tokens: however long fine-tuning lasts, these stay below about this probability: {told}. So many "
        "other tokens have the same row of the base's output head, for it was never trained to write them, and "
        "adapters leave the head as it is; take a model that was trained on them, or a tokenizer and a tool parser "
        "whose marks are ordinary text"
    )
