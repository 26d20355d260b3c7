"""Settings of a fake engine; frozen, so that a test can see at once what it runs against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FaultKind = Literal["error", "drop", "stall", "refuse", "abort", "cut"]


@dataclass(frozen=True)
class Fault:
    """What goes wrong in a generation, `after_tokens` tokens, for the next `times` generations (-1: all).

    `error`: vLLM's error object and then `[DONE]`. `drop`: the connection breaks. `stall`: nothing comes any more.
    `refuse`: HTTP 500 before anything. `abort`: the stream ends with finish reason `abort`. `cut`: it ends well, but
    without any finish reason.
    """

    kind: FaultKind
    after_tokens: int = 3
    times: int = 1


@dataclass(frozen=True)
class FakeSettings:
    """How the fake behaves. `tokens_per_s` None means no waiting; `chunk_tokens` is how many ids an event carries.

    `draws`: answers are not from the script but drawn from so many different tokens, by a generator that the request
    seeds or, without a seed, by the engine's own, which begins anew with each start; as vLLM samples.
    `keep_times`: how long each turn took here is kept, for `GET /fake/times`. `old_wire`: as vLLM 0.26
    speaks (see `old_wire.py`). `intervals`: `stream_interval` is honoured. `load_s`: how long loading an adapter takes.
    """

    model: str = "fake"
    max_model_len: int = 32768
    latency_first_s: float = 0.0
    tokens_per_s: float | None = None
    chunk_tokens: int = 1
    exact: bool = True
    parser: bool = True
    raw_logprobs: bool = False
    runtime_lora: bool = True
    load_s: float = 0.0
    max_loras: int = 4
    old_wire: bool = False
    draws: int = 0
    keep_requests: int = 10_000
    keep_times: bool = False
    intervals: bool = True
