"""Going on with a generation after its engine died: what is asked of the next one, and what the seam must not break.

Pure functions on values. Tokens are exact, so prompt and tokens so far are a prompt like any other; but an engine
counts output from that point on, so limits shrink, seeds change, and stop strings that cross the seam are found here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from turngate.proxy.engine.types import Chunk, GenerateCall

Decode = Callable[[Sequence[int], bool], str]
"""`(ids, skip_special_tokens) -> text`."""

# What an engine computes from its own output only, so that it would begin anew at the seam.
_COUNT_OUTPUT = ("presence_penalty", "frequency_penalty", "bad_words", "structured_outputs", "thinking_token_budget")
_SEED_BITS = 63


@dataclass(frozen=True, slots=True)
class Stretch:
    """Output tokens `start:end` of one answer and the engine that sampled them."""

    start: int
    end: int
    engine: str


def obstacle(call: GenerateCall) -> str | None:
    """The sampling parameter that makes `call` impossible to continue once it has output, or None."""
    return next((key for key in _COUNT_OUTPUT if call.sampling_params.get(key)), None)


def derived_seed(request_id: str, seed: int | None, start: int) -> int:
    """The seed with which output goes on at token `start`.

    The same seed again would draw the numbers of the first tokens again (39 of 39 did), and so may none at all: an
    engine that was restarted begins its own stream of numbers where it began before. With a seed of the agent's the
    new one follows from it, so an answer that broke at the same place is the same answer; else from the turn's id.
    """
    source = f"{request_id if seed is None else seed}:{start}".encode()
    digest = hashlib.blake2b(source, digest_size=8, person=b"turngate-seam").digest()
    return int.from_bytes(digest, "little") >> (64 - _SEED_BITS)


def continued(call: GenerateCall, ids: Sequence[int]) -> GenerateCall:
    """`call` after it has given `ids`: one prompt of both, and what is left of its limits."""
    params = dict(call.sampling_params)
    params["seed"] = derived_seed(call.request_id, params.get("seed"), len(ids))
    if params.get("max_tokens") is not None:
        params["max_tokens"] -= len(ids)
    if params.get("min_tokens"):
        params["min_tokens"] = max(0, params["min_tokens"] - len(ids))
    prompt = np.concatenate([call.ids, np.asarray(ids, dtype=np.int32)]).astype(np.int32, copy=False)
    return replace(call, ids=prompt, sampling_params=params, request_id=f"{call.request_id}-at-{len(ids)}")


def already_over(params: Mapping[str, Any], ids: Sequence[int], ends: frozenset[int]) -> Chunk | None:
    """The last chunk of an answer that was complete when its engine died before saying so; None when it was not."""
    limit = params.get("max_tokens")
    if ids and ids[-1] in ends and not params.get("ignore_eos"):
        return Chunk((), (), None, "stop", None)
    if ids and ids[-1] in (params.get("stop_token_ids") or ()):
        return Chunk((), (), None, "stop", ids[-1])
    return Chunk((), (), None, "length", None) if limit is not None and len(ids) >= limit else None


class SeamStops:
    """Finds the stop strings that begin before a seam and end after it, as the first engine would have.

    Args:
        stop: the stop strings.
        decode: ids to text.
        before: all output ids before the seam.
        min_tokens: how much output an answer has before stop strings count.
        skip_special: whether special tokens are part of the text.
    """

    def __init__(
        self, stop: Sequence[str], decode: Decode, before: Sequence[int], *, min_tokens: int, skip_special: bool
    ) -> None:
        self._stop = [one for one in stop if one]
        self._reach = max((len(one) for one in self._stop), default=1) - 1
        self._total = len(before)
        # A character has at most four tokens, one before the first has to be there for its leading space.
        self._ids = list(before[-(4 * self._reach + 16) :])
        self._decode, self._min_tokens, self._skip_special = decode, min_tokens, skip_special
        self._text = self._seam = self._decoded()

    @property
    def open(self) -> bool:
        """Whether a stop string can still cross the seam."""
        return len(self._text) - len(self._seam) < self._reach

    def cut(self, chunk: Chunk) -> Chunk:
        """`chunk`, or as much of it as ends with the token that completes a stop string, as the last chunk."""
        for count, token in enumerate(chunk.ids, start=1):
            if not self.open:
                return chunk
            said = len(self._text)
            self._ids.append(token)
            self._total += 1
            self._text = self._decoded()
            found = self._crossing(said)
            if found is not None and self._total > self._min_tokens:
                top = None if chunk.top is None else chunk.top[:count]
                return Chunk(chunk.ids[:count], chunk.logprobs[:count], top, "stop", found)
        return chunk

    def _crossing(self, said: int) -> str | None:
        """The stop string that the last token completed and that began before the seam (or in the cut character)."""
        for stop in self._stop:
            at = self._text.find(stop, max(0, said - len(stop) + 1))
            if 0 <= at <= len(self._seam):
                return stop
        return None

    def _decoded(self) -> str:
        return self._decode(self._ids, self._skip_special).rstrip("\ufffd")
