"""What passes between the gateway and an engine, as frozen values.

The request path, the stores and the tests name these instead of vLLM's JSON, so a change of vLLM's wire stays inside
this package. Nothing here may hold a connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from turngate.proxy.turns import IntArray

LogprobsMode = Literal["processed", "raw", "unknown"]

LOGPROB_FLOOR = -9999.0
"""What stands for a log-probability that is minus infinity, NaN or missing: vLLM's own sentinel."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What one engine can do, as probed.

    `exact`: render, generate and derender are all there. `logprobs_mode`: `processed` when the reported log-probs are
    those of the sampled distribution. `derender_tail_tokens`: how many last prompt ids derender needs; None means the
    whole prompt. `max_loras`: adapters that can run at once, None when the engine does not say.
    `has_parser`: a tool or reasoning parser is configured, so tools may be offered. `derender_streams`: derender takes
    an answer piece by piece; if not (vLLM 0.26), only plain text streams and tool calls come at the end.
    `takes_interval`: generate does not refuse `stream_interval`. `plain_until_marked`: derender gives text as it is
    until a marker that `text_ahead` knows appears.
    """

    model: str
    max_model_len: int
    vllm_version: str | None
    exact: bool
    logprobs_mode: LogprobsMode
    derender_tail_tokens: int | None
    runtime_lora: bool
    max_loras: int | None
    has_parser: bool
    derender_streams: bool = True
    takes_interval: bool = False
    plain_until_marked: bool = False


def in_common(found: Sequence[Capabilities]) -> Capabilities:
    """What every one of these engines can do; at least one."""
    modes = {one.logprobs_mode for one in found}
    loras = [one.max_loras for one in found if one.max_loras is not None]
    return replace(
        found[0],
        max_model_len=min(one.max_model_len for one in found),
        exact=all(one.exact for one in found),
        logprobs_mode="raw" if "raw" in modes else "unknown" if "unknown" in modes else "processed",
        derender_tail_tokens=None if any(one.derender_tail_tokens is None for one in found) else 8,
        runtime_lora=all(one.runtime_lora for one in found),
        max_loras=min(loras) if loras else None,
        has_parser=all(one.has_parser for one in found),
        derender_streams=all(one.derender_streams for one in found),
        takes_interval=all(one.takes_interval for one in found),
    )


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered request: `ids: int32[P]`, resolved sampling parameters, and what generate must get back as it is."""

    ids: IntArray
    sampling_params: dict[str, Any]
    extra: dict[str, Any]


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """One generation: prompt `ids: int32[P]`; `request_id` unique among those in flight; `top_logprobs` in 0..20.

    `interval_tokens`: how many tokens an event after the first may wait for, where the engine knows of that.
    """

    model: str
    ids: IntArray
    sampling_params: dict[str, Any]
    extra: dict[str, Any]
    request_id: str
    top_logprobs: int = 0
    interval_tokens: int = 1


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens as they arrive. `logprobs` has one natural log per id.

    `top`, when asked for, has for each id up to K pairs (token id, log-prob), most likely first. `finish_reason` is
    `stop` or `length` on the last chunk, else None; `stop_reason` is the stop string or stop id, None for the model's
    own end-of-turn token.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top: tuple[tuple[tuple[int, float], ...], ...] | None
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine says about itself: requests running and waiting, KV cache in use (0..1)."""

    running: int
    waiting: int
    kv_usage: float
