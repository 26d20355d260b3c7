"""The fake model: which tokens follow a prompt, and their log-probabilities, as pure functions.

Log-probs come from a small synthetic distribution that depends on position, token, model name and temperature, so
that rescoring, log-prob-mode probes and base-against-adapter canaries all see what they would see from a real one.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.fake_engine.tokens import Tokens

_CANDIDATES = 24
_SLOPE = 1.6


@dataclass(frozen=True)
class Completion:
    """All tokens of an answer and how it ends."""

    ids: list[int]
    finish_reason: str
    stop_reason: int | str | None


def complete(tokens: Tokens, ids: list[int], params: dict[str, Any], room_tokens: int) -> Completion:
    """The answer `ids` as a model would sample it: end-of-turn token, stop strings, stop ids, token limit."""
    limit = min(params.get("max_tokens") or room_tokens, room_tokens)
    stops = _strings(params.get("stop"))
    stop_ids = set(params.get("stop_token_ids") or ())
    said = ""
    for count, token in enumerate(ids, start=1):
        if token in stop_ids:
            return Completion(ids[:count], "stop", token)
        if token == tokens.eos_id:
            return Completion(ids[:count], "stop", None)
        if stops:
            seen = len(said)
            said = tokens.decode(ids[:count], skip_special=True)
            hit = next((stop for stop in stops if said.find(stop, max(seen - len(stop), 0)) >= 0), None)
            if hit is not None:
                return Completion(ids[:count], "stop", hit)
        if count >= limit:
            return Completion(ids[:count], "length", None)
    return Completion(ids, "stop", None)


def token_logprobs(
    token: int, position: int, model: str, temperature: float, k: int, vocab_tokens: int
) -> tuple[float, int, list[tuple[int, float, int]]]:
    """Log-prob and rank of `token` at absolute `position`, and `k` alternatives as (id, log-prob, rank)."""
    salt = zlib.crc32(model.encode())
    chaos = zlib.crc32(f"{token}.{position}.{salt}".encode())
    rank = (0, 0, 0, 0, 0, 1, 1, 2)[chaos % 8]
    slope = _SLOPE * (1 + (chaos >> 8 & 0xFF) / 512) / max(temperature, 1e-3)
    norm = math.log((1 - math.exp(-slope * _CANDIDATES)) / (1 - math.exp(-slope)))
    if 0 <= k <= 1:
        logprob = -slope * rank - norm
        return logprob, rank + 1, [(token, logprob, rank + 1)]
    candidates = [(token + (j - rank) * 7) % vocab_tokens for j in range(_CANDIDATES)]
    ranked = [(candidates[j], -slope * j - norm, j + 1) for j in range(_CANDIDATES)]
    rest = [one for one in ranked if one[2] != rank + 1]
    return ranked[rank][1], rank + 1, [ranked[rank], *rest][: max(k, 1) if k >= 0 else 0]


def logprob_content(
    ids: Sequence[int],
    start: int,
    model: str,
    temperature: float,
    k: int,
    vocab_tokens: int,
    wanted: Sequence[int] = (),
) -> list[dict[str, Any]]:
    """vLLM's `logprobs.content` for `ids` sampled from absolute position `start` on.

    `wanted` tokens (`logprob_token_ids`) take the places of the likeliest ones.
    """
    content = []
    for offset, token in enumerate(ids):
        at = start + offset
        logprob, rank, top = token_logprobs(token, at, model, temperature, k, vocab_tokens)
        if wanted:
            others = (token_logprobs(one, at, model, temperature, 1, vocab_tokens)[2][0] for one in wanted)
            top = [top[0], *others]
        alternatives = [{"token_id": one, "logprob": value, "rank": place} for one, value, place in top]
        content.append({"token_id": token, "logprob": logprob, "rank": rank, "top_logprobs": alternatives})
    return content


def _strings(stop: Any) -> list[str]:
    return [stop] if isinstance(stop, str) else [one for one in stop or () if one]
