"""The turn tree: what one model call was, as frozen values.

Pure by design (no I/O, no clock, no engine) so that storing, verifying and training all read the same shape, and so
that properties can be tested without a server. Nothing here may guess a token: ids are only ever copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
HalfArray = NDArray[np.float16]

Kind = Literal["first", "spliced", "break"]
Label = Literal["main", "subagent", "side", "compaction"]
Mode = Literal["exact", "transparent", "demonstration"]

NO_VERSION = -1
"""The version of tokens that no policy sampled."""


@dataclass(frozen=True, slots=True)
class Span:
    """Completion tokens `start:end` of a turn and the policy version that sampled them. Version 0 is the base.

    `engine` is the replica that sampled them, where the turn was gone on with on another; else it is `Turn.engine`.
    """

    start: int
    end: int
    policy: str
    version: int
    adapter: str | None
    engine: str = ""


@dataclass(frozen=True, slots=True)
class Timings:
    """When the turn happened: `received_at_ns` is UTC for display, the others monotonic for durations (all in ns)."""

    received_at_ns: int
    received_ns: int
    dispatched_ns: int
    first_token_ns: int
    done_ns: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One model call of a session. Its prompt is the first `base_tokens` ids of `base`'s path, then `tail_ids`.

    A path is a turn's prompt followed by its completion. A `first` turn has no base. A `spliced` turn continues the
    whole path of its base. A `break` is a turn whose history was rewritten: it may share the head of an earlier path
    (`base` with `base_tokens` below that path's length) or nothing, and it says why in `break_cause`.

    `tail_ids: int32[T]`, `completion_ids: int32[C]` (stop token included), `logprobs: float32[C]` (natural log, of the
    sampled distribution), `top_ids: int32[C, K]` and `top_logprobs: float16[C, K]` when asked for.
    `request` is `{"messages": new messages only, "tools": list or None, "params": {...}}`: of a spliced turn the
    messages and tools before it are those of the base plus the base's `response`. `response` is the assistant
    message as the client got it. `sampling_asked` is what the agent wanted, `sampling_used` what the engine was told.
    `mode` demonstration: a teacher said it and the engine rendered `completion_ids`; nothing was sampled, so all
    `logprobs` are NaN and the span's version is `NO_VERSION`.
    `agent` is the harness's own id of the conversation, `parent` the turn whose tool call started a subagent's
    conversation (None: not known, or no subagent).
    """

    id: str
    rollout: str
    seq: int
    kind: Kind
    base: str | None
    base_tokens: int
    break_cause: str | None
    tail_ids: IntArray
    completion_ids: IntArray
    logprobs: FloatArray
    spans: tuple[Span, ...]
    finish_reason: str
    stop_reason: int | str | None
    timings: Timings
    label: Label = "main"
    label_reason: str = "default"
    mode: Mode = "exact"
    engine: str = ""
    top_ids: IntArray | None = None
    top_logprobs: HalfArray | None = None
    sampling_asked: Mapping[str, Any] = field(default_factory=dict)
    sampling_used: Mapping[str, Any] = field(default_factory=dict)
    request: Mapping[str, Any] = field(default_factory=dict)
    response: Mapping[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    agent: str | None = None
    parent: str | None = None

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return self.base_tokens + len(self.tail_ids)

    @property
    def path_tokens(self) -> int:
        """Length of prompt plus completion in tokens."""
        return self.prompt_tokens + len(self.completion_ids)


class BrokenTree(ValueError):
    """A turn does not fit its tree: its base is missing, later or shorter than it says, or its arrays disagree."""


def by_id(turns: Iterable[Turn]) -> dict[str, Turn]:
    """Turns keyed by id."""
    return {turn.id: turn for turn in turns}


def prompt_ids(turns: Mapping[str, Turn], turn: Turn) -> IntArray:
    """The whole prompt of `turn` as `int32[P]`, walked up through its bases.

    Raises:
        BrokenTree: a base is missing or shorter than `base_tokens`.
    """
    pieces: list[IntArray] = [turn.tail_ids]
    wanted, base_id, child = turn.base_tokens, turn.base, turn
    while wanted > 0:
        base = turns.get(base_id) if base_id is not None else None
        if base is None or base.seq >= child.seq or base.path_tokens < wanted:
            raise BrokenTree(f"turn {child.id} needs {wanted} tokens of {base_id}, which does not have them")
        if wanted > base.prompt_tokens:
            pieces.append(base.completion_ids[: wanted - base.prompt_tokens])
            wanted = base.prompt_tokens
        if wanted > base.base_tokens:
            pieces.append(base.tail_ids[: wanted - base.base_tokens])
            wanted = base.base_tokens
        base_id, child = base.base, base
    ids: IntArray = np.concatenate(pieces[::-1]).astype(np.int32, copy=False)
    return ids


def path_ids(turns: Mapping[str, Turn], turn: Turn) -> IntArray:
    """Prompt and completion of `turn` as `int32[P + C]`."""
    ids: IntArray = np.concatenate([prompt_ids(turns, turn), turn.completion_ids]).astype(np.int32, copy=False)
    return ids


def full_messages(turns: Mapping[str, Turn], turn: Turn) -> list[Any]:
    """The messages of the request that led to `turn`, rebuilt from what each turn added.

    Raises:
        BrokenTree: a spliced turn's base is missing or later than itself.
    """
    chain = [turn]
    while chain[-1].kind == "spliced":
        base = turns.get(chain[-1].base or "")
        if base is None or base.seq >= chain[-1].seq:
            raise BrokenTree(f"turn {chain[-1].id} continues {chain[-1].base}, which is not recorded before it")
        chain.append(base)
    messages: list[Any] = []
    for link in reversed(chain):
        messages.extend(link.request.get("messages", ()))
        if link is not turn:
            messages.append(dict(link.response))
    return messages


def counts(turns: Sequence[Turn]) -> dict[str, int]:
    """How many turns of each kind: `{"turns", "spliced", "breaks"}`."""
    return {
        "turns": len(turns),
        "spliced": sum(turn.kind == "spliced" for turn in turns),
        "breaks": sum(turn.kind == "break" for turn in turns),
    }
