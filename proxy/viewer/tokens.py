"""Tokens of a turn or row as chips: text, log-prob bucket, alternatives, and runs of what is alike.

The page must say exactly what was recorded, so numbers are passed on unrounded beside the text; only the colour is a
bucket. Nothing here decides what is trained: that is `rows.py`.
"""

from __future__ import annotations

import itertools
import json
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from turngate.proxy.rows import Row
from turngate.proxy.turns import IntArray, Turn
from turngate.proxy.viewer.text import Piece, TokenText

SURPRISE_NATS = (0.1, 0.35, 0.7, 1.5, 3.0, 5.0)
"""Upper bounds of the colour buckets 0..5 in nats of surprise (-log p); bucket 6 is beyond the last."""

TITLE_ALTERNATIVES = 5


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another token the model could have sampled here."""

    id: int
    text: str
    logprob: float
    probability: float
    sampled: bool


@dataclass(frozen=True, slots=True)
class Chip:
    """One token. `place` counts from the start of the prompt; `logprob` is None where nothing was sampled."""

    place: int
    piece: Piece
    logprob: float | None = None
    version: int | None = None
    alternatives: tuple[Alternative, ...] = ()

    @property
    def bucket(self) -> int:
        """Colour bucket 0 (sure) to 6 (surprised)."""
        return 0 if self.logprob is None else surprise_bucket(self.logprob)

    @property
    def probability(self) -> float | None:
        """exp(logprob)."""
        return None if self.logprob is None else math.exp(min(0.0, self.logprob))

    @property
    def breaks_line(self) -> int:
        """How many line ends the text holds, to be drawn as such."""
        return 0 if self.piece.special else self.piece.text.count("\n")

    @property
    def title(self) -> str:
        """What hovering says."""
        lines = [f"{self.piece.text!r}  id {self.piece.id}  #{self.place}"]
        if self.logprob is not None:
            lines.append(f"log-prob {self.logprob:.4f}  p {self.probability:.4f}")
        lines += [f"{a.probability:6.1%}  {a.text!r}" for a in self.alternatives[:TITLE_ALTERNATIVES]]
        return "\n".join(lines)

    @property
    def data(self) -> str:
        """The alternatives as JSON, for the page's script."""
        rows = [[a.id, a.text, round(a.logprob, 4), int(a.sampled)] for a in self.alternatives]
        return json.dumps(rows, ensure_ascii=False, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class Stretch:
    """Neighbouring tokens of a row that are alike: trained or context. `hidden` context tokens are left out."""

    trained: bool
    chips: Sequence[Chip]
    hidden: int = 0


def surprise_bucket(logprob: float) -> int:
    """0..6; a missing or infinite log-prob is 6."""
    return bisect_left(SURPRISE_NATS, -logprob) if math.isfinite(logprob) else len(SURPRISE_NATS)


def prompt_chips(text: TokenText, ids: IntArray, start: int = 0) -> list[Chip]:
    """Chips of prompt tokens `ids: int32[N]`, the first of which is at place `start`."""
    return [Chip(start + place, piece) for place, piece in enumerate(text.pieces(ids.tolist()))]


def completion_chips(text: TokenText, turn: Turn, most: int | None = None) -> list[Chip]:
    """Chips of the (first `most`) completion tokens of `turn`, with log-probs, versions and alternatives."""
    versions = np.full(len(turn.completion_ids), -1, dtype=np.int32)
    for span in turn.spans:
        versions[span.start : span.end] = span.version
    return [
        Chip(
            turn.prompt_tokens + place,
            piece,
            _known(turn.logprobs[place]) if place < len(turn.logprobs) else None,
            int(versions[place]),
            tuple(_alternatives(text, turn, place)),
        )
        for place, piece in enumerate(text.pieces(turn.completion_ids[:most].tolist()))
    ]


def row_stretches(text: TokenText, row: Row, keep: int = 24) -> list[Stretch]:
    """The row's tokens in stretches; context longer than `3 * keep` shows its first and last `keep` tokens."""
    pieces = text.pieces(row.ids.tolist())
    edges = [0, *(np.flatnonzero(np.diff(row.mask.astype(np.int8))) + 1).tolist(), len(row.ids)]
    stretches: list[Stretch] = []
    for start, end in itertools.pairwise(edges):
        if start == end:
            continue
        trained = bool(row.mask[start])
        chips = [
            Chip(n, pieces[n], _known(row.logprobs[n]) if trained else None, int(row.versions[n]) if trained else None)
            for n in range(start, end)
        ]
        if trained or len(chips) <= 3 * keep:
            stretches.append(Stretch(trained, chips))
            continue
        stretches.append(Stretch(False, chips[:keep], hidden=len(chips) - 2 * keep))
        stretches.append(Stretch(False, chips[-keep:]))
    return stretches


def _known(logprob: float) -> float | None:
    """A log-prob; None for a demonstration's, which has none."""
    return None if math.isnan(logprob) else float(logprob)


def _alternatives(text: TokenText, turn: Turn, place: int) -> list[Alternative]:
    if turn.top_ids is None or turn.top_logprobs is None or place >= len(turn.top_ids):
        return []
    sampled = int(turn.completion_ids[place])
    return [
        Alternative(number, text.one(number), logprob, math.exp(min(0.0, logprob)), number == sampled)
        for number, logprob in zip(turn.top_ids[place].tolist(), turn.top_logprobs[place].tolist(), strict=True)
        if number >= 0 and math.isfinite(logprob)
    ]
