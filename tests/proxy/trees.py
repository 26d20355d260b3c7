"""Turns for tests: one with defaults, and random trees of them with partial bases, breaks and forks."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from turngate.proxy.turns import Span, Timings, Turn

LABELS = ("main", "subagent", "side", "compaction")


def make_turn(turn_id: str, seq: int, **changes: Any) -> Turn:
    """A turn with nothing special about it."""
    plain: dict[str, Any] = {
        "kind": "first",
        "base": None,
        "base_tokens": 0,
        "break_cause": None,
        "tail_ids": np.zeros(1, dtype=np.int32),
        "completion_ids": np.zeros(1, dtype=np.int32),
        "logprobs": np.zeros(1, dtype=np.float32),
        "spans": (),
        "finish_reason": "stop",
        "stop_reason": None,
        "timings": Timings(0, 0, 0, 0, 0),
    }
    return Turn(id=turn_id, rollout="r", seq=seq, **{**plain, **changes})


@st.composite
def trees(draw: st.DrawFn) -> list[Turn]:
    """Up to 9 turns of one rollout. Token ids are all different, so that a misplaced one is seen."""
    turns: list[Turn] = []
    fresh = 1
    for seq in range(draw(st.integers(0, 9))):
        kind = draw(st.sampled_from(["first", "spliced", "spliced", "break"])) if turns else "first"
        base = draw(st.sampled_from(turns)) if kind != "first" else None
        shared = base.path_tokens if base else 0
        if base and kind == "break":
            shared = draw(st.integers(0, base.path_tokens))
        tail, size = draw(st.integers(0 if shared else 1, 4)), draw(st.integers(0, 4))
        cut = draw(st.integers(0, size))
        spans = (Span(0, cut, "p", seq, None), Span(cut, size, "p", seq + 100, None))
        turns.append(
            make_turn(
                f"t{seq}",
                seq,
                kind=kind,
                base=base.id if base else None,
                base_tokens=shared,
                break_cause="message_edited" if kind == "break" else None,
                tail_ids=np.arange(fresh, fresh + tail, dtype=np.int32),
                completion_ids=np.arange(fresh + tail, fresh + tail + size, dtype=np.int32),
                logprobs=-np.arange(fresh + tail, fresh + tail + size, dtype=np.float32),
                spans=spans,
                label=draw(st.sampled_from(LABELS[:2] if draw(st.booleans()) else LABELS)),
            )
        )
        fresh += tail + size
    return turns
