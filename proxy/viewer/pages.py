"""What the pages of a rollout show, computed from its turns: cards, steps of the conversation, timings, sampling.

Pure: turns in, frozen values out, so that a page's facts are tested without a server and templates stay dumb.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from turngate.proxy.turns import Turn, by_id
from turngate.proxy.viewer.messages import Message, tool_names, view_message

COMMON_SAMPLING = frozenset({"temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "logprobs", "stop"})


@dataclass(frozen=True, slots=True)
class Phase:
    """One part of a turn's time: its name, length in ms, and place in a bar 100 wide."""

    name: str
    ms: float
    x: float
    width: float


@dataclass(frozen=True, slots=True)
class Card:
    """A turn in the timeline. Times in ms; `depth` is how far from the main path it is drawn."""

    turn: Turn
    depth: int
    versions: tuple[int, ...]
    start_ms: float
    queue_ms: float
    ttft_ms: float
    total_ms: float
    tokens_per_s: float | None
    mean_logprob: float | None
    phases: tuple[Phase, ...]

    @property
    def seq(self) -> int:
        """The turn's number in its rollout."""
        return self.turn.seq


@dataclass(frozen=True, slots=True)
class Step:
    """A turn in the conversation: what came in since its base, and what the model said."""

    card: Card
    messages: tuple[Message, ...]
    response: Message


@dataclass(frozen=True, slots=True)
class Asked:
    """One sampling parameter as the agent asked and as the engine was told."""

    name: str
    asked: Any
    used: Any

    @property
    def common(self) -> bool:
        """Whether it is shown at first: asked for, or one that people look for."""
        return self.asked is not None or self.name in COMMON_SAMPLING

    @property
    def overridden(self) -> bool:
        """Whether the agent asked for something else than was used."""
        return self.asked is not None and self.asked != self.used


def cards(turns: Sequence[Turn]) -> list[Card]:
    """Cards in order of `seq`; the bars of all turns share one time axis."""
    ordered = sorted(turns, key=lambda turn: turn.seq)
    if not ordered:
        return []
    known = by_id(ordered)
    start_ns = min(turn.timings.received_at_ns for turn in ordered)
    end_ns = max(t.timings.received_at_ns + t.timings.done_ns - t.timings.received_ns for t in ordered)
    depths: dict[str, int] = {}
    for turn in ordered:
        base = known.get(turn.base) if turn.base is not None else None
        above = depths.get(turn.base or "", 0)
        if base is None:
            depths[turn.id] = depths[turn.parent] + 1 if turn.parent in depths else int(turn.label != "main")
        else:
            depths[turn.id] = above if turn.kind == "spliced" else min(4, above + 1)
    return [_card(turn, depths[turn.id], start_ns, max(1, end_ns - start_ns)) for turn in ordered]


def steps(turns: Sequence[Turn]) -> list[Step]:
    """The conversation, one step a turn."""
    shown = []
    names: dict[str, str] = {}
    for card in cards(turns):
        new = card.turn.request.get("messages") or ()
        names |= tool_names([*new, card.turn.response])
        shown.append(
            Step(card, tuple(view_message(message, names) for message in new), view_message(dict(card.turn.response)))
        )
    return shown


def sampling(turn: Turn) -> list[Asked]:
    """Sampling parameters, asked and used, by name; both names of the token limit are one."""
    asked = dict(turn.sampling_asked)
    if "max_completion_tokens" in asked and "max_tokens" not in asked:
        asked["max_tokens"] = asked.pop("max_completion_tokens")
    names = sorted(asked.keys() | turn.sampling_used.keys())
    return [Asked(name, asked.get(name), turn.sampling_used.get(name)) for name in names]


def record(turn: Turn) -> dict[str, Any]:
    """Everything about `turn` that is not an array of tokens, for reading as JSON."""
    times = turn.timings
    return {
        "id": turn.id,
        "rollout": turn.rollout,
        "seq": turn.seq,
        "kind": turn.kind,
        "base": turn.base,
        "base_tokens": turn.base_tokens,
        "break_cause": turn.break_cause,
        "label": turn.label,
        "label_reason": turn.label_reason,
        "agent": turn.agent,
        "parent": turn.parent,
        "mode": turn.mode,
        "engine": turn.engine,
        "finish_reason": turn.finish_reason,
        "stop_reason": turn.stop_reason,
        "flags": list(turn.flags),
        "tail_tokens": len(turn.tail_ids),
        "completion_tokens": len(turn.completion_ids),
        "spans": [
            [span.start, span.end, span.policy, span.version, span.adapter, span.engine or turn.engine]
            for span in turn.spans
        ],
        "timings_ns": {
            "received_at": times.received_at_ns,
            "received": times.received_ns,
            "dispatched": times.dispatched_ns,
            "first_token": times.first_token_ns,
            "done": times.done_ns,
        },
    }


def _card(turn: Turn, depth: int, start_ns: int, whole_ns: int) -> Card:
    times = turn.timings
    marks = [times.received_ns, times.dispatched_ns, times.first_token_ns, times.done_ns]
    for place in range(1, 4):
        marks[place] = max(marks[place], marks[place - 1])
    offset_ns = times.received_at_ns - start_ns
    scale = 100.0 / whole_ns
    phases = tuple(
        Phase(
            name,
            (end - start) / 1e6,
            round((offset_ns + start - marks[0]) * scale, 3),
            round(max(0.25, (end - start) * scale), 3),
        )
        for name, start, end in zip(("queue", "prefill", "decode"), marks, marks[1:], strict=False)
    )
    decode_s = (marks[3] - marks[2]) / 1e9
    tokens = len(turn.completion_ids)
    return Card(
        turn=turn,
        depth=depth,
        versions=tuple(sorted({span.version for span in turn.spans})),
        start_ms=offset_ns / 1e6,
        queue_ms=(marks[1] - marks[0]) / 1e6,
        ttft_ms=(marks[2] - marks[0]) / 1e6,
        total_ms=(marks[3] - marks[0]) / 1e6,
        tokens_per_s=(tokens - 1) / decode_s if decode_s > 0 and tokens > 1 else None,
        mean_logprob=float(turn.logprobs.mean()) if len(turn.logprobs) and turn.mode != "demonstration" else None,
        phases=phases,
    )
