"""What an engine has produced so far in one turn: ids, log-probs, alternatives, and how it ended."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from turngate.proxy.engine.types import Chunk
from turngate.proxy.turns import HalfArray, IntArray


@dataclass(slots=True)
class Sampled:
    """Grows chunk by chunk. `first_token_ns` is monotonic, 0 before the first token."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: int | str | None = None
    first_token_ns: int = 0

    def take(self, chunk: Chunk) -> None:
        """Add a chunk."""
        if chunk.ids and not self.first_token_ns:
            self.first_token_ns = time.monotonic_ns()
        self.ids.extend(chunk.ids)
        self.logprobs.extend(chunk.logprobs)
        if chunk.top is not None:
            self.top.extend(chunk.top)
        if chunk.finish_reason:
            self.finish_reason, self.stop_reason = chunk.finish_reason, chunk.stop_reason

    def packed_top(self, k: int) -> tuple[IntArray | None, HalfArray | None]:
        """Alternatives: `int32[C, K]` and `float16[C, K]`, missing places -1 and -inf; None when there are none."""
        if k == 0 or not self.top:
            return None, None
        ids = np.full((len(self.top), k), -1, dtype=np.int32)
        logprobs = np.full((len(self.top), k), -np.inf, dtype=np.float16)
        for i, entries in enumerate(self.top):
            for j, (token, logprob) in enumerate(entries[:k]):
                ids[i, j], logprobs[i, j] = token, logprob
        return ids, logprobs
