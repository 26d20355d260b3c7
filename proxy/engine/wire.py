"""vLLM's JSON to this package's values and back: pure functions, no HTTP.

Kept apart from the client so that recorded bodies of every supported vLLM can be parsed in tests. Nothing here may
guess: a body that is not understood is a fault.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from turngate.proxy.engine.errors import EngineFault
from turngate.proxy.engine.types import LOGPROB_FLOOR, Chunk, EngineLoad, GenerateCall, Rendered

# vLLM's own limit unless started with another `--max-logprobs`.
MAX_LOGPROBS = 20

# Of a chat request, what render must not see: it would refuse it, or put it into the sampling parameters.
_NOT_RENDERED = frozenset(
    {"stream", "stream_options", "n", "best_of", "use_beam_search", "logprobs", "top_logprobs", "prompt_logprobs"}
)
# Of a chat request, what derender's parsers read.
_DERENDERED = ("tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "include_reasoning")
_EXTRA = ("reasoning_ended", "reasoning_parser_kwargs", "features")
_PARTS = ("content", "reasoning", "reasoning_content")
_MAX_TOKENS = ("max_tokens", "max_completion_tokens")

Delta = dict[str, Any]
State = dict[str, Any]


def render_body(body: Mapping[str, Any], max_model_len: int | None) -> dict[str, Any]:
    """A chat request as render takes it: no nulls, nothing that only concerns the answer's form.

    A token limit above the context is left out, because vLLM refuses it; render then fills in what fits.
    """
    out = {key: value for key, value in body.items() if value is not None and key not in _NOT_RENDERED}
    for key in _MAX_TOKENS:
        if max_model_len is not None and isinstance(out.get(key), int) and out[key] > max_model_len:
            del out[key]
    return out


def parse_rendered(value: Any) -> Rendered:
    """Render's answer.

    Raises:
        EngineFault: there are no ids in it.
    """
    try:
        ids = np.asarray(value["token_ids"], dtype=np.int32)
        params = dict(value["sampling_params"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise EngineFault(f"render answered without usable token_ids and sampling_params: {value!r:.300}") from error
    return Rendered(ids, params, {key: value[key] for key in _EXTRA if value.get(key) is not None})


def generate_body(call: GenerateCall, *, stream: bool) -> dict[str, Any]:
    """The body of `/inference/v1/generate`.

    One alternative more than wanted is asked for: vLLM puts the sampled token first and cuts the list after it.
    """
    top = min(call.top_logprobs + 1, MAX_LOGPROBS) if call.top_logprobs else 0
    params = {**call.sampling_params, "logprobs": top}
    if stream and call.interval_tokens > 1:
        params["stream_interval"] = call.interval_tokens
    return {
        **call.extra,
        "request_id": call.request_id,
        "model": call.model,
        "token_ids": np.ascontiguousarray(call.ids),
        "sampling_params": params,
        "stream": stream,
    }


def parse_chunk(value: Mapping[str, Any], top_logprobs: int) -> Chunk | None:
    """One event of generate's stream, or a whole answer; None for an event without a choice (usage).

    Raises:
        EngineFault: ids and log-probs do not match, or a field is missing.
    """
    try:
        choices = value["choices"]
        if not choices:
            return None
        choice = choices[0]
        ids = tuple(choice["token_ids"] or ())
        entries = ((choice.get("logprobs") or {}).get("content")) or ()
        if [token_id_of(entry) for entry in entries] != list(ids):
            raise EngineFault(
                f"the engine sent {len(ids)} ids with {len(entries)} log-probs that do not belong to them"
            )
        top = tuple(_top(entry, top_logprobs) for entry in entries) if top_logprobs else None
        logprobs = tuple(finite(entry["logprob"]) for entry in entries)
        return Chunk(ids, logprobs, top, choice.get("finish_reason"), choice.get("stop_reason"))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise EngineFault(f"the engine sent a chunk that is not generate's: {value!r:.300}") from error


class _Entry(msgspec.Struct, gc=False):
    token_id: int
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Entry]


class _Choice(msgspec.Struct):
    token_ids: list[int]
    logprobs: _Logprobs
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice]
    error: msgspec.Raw | None = None


_EVENT = msgspec.json.Decoder(_Event)


def quick_chunk(data: bytes) -> Chunk | None:
    """The chunk in the usual event of generate's stream, alternatives left out; None: `parse_chunk` must look at it."""
    try:
        event = _EVENT.decode(data)
    except msgspec.DecodeError:
        return None
    if len(event.choices) != 1 or event.error is not None:
        return None
    choice = event.choices[0]
    entries = choice.logprobs.content
    if [entry.token_id for entry in entries] != choice.token_ids:
        return None
    logprobs = [entry.logprob for entry in entries]
    if logprobs and min(logprobs) < LOGPROB_FLOOR:
        logprobs = [max(one, LOGPROB_FLOOR) for one in logprobs]
    return Chunk(tuple(choice.token_ids), tuple(logprobs), None, choice.finish_reason, choice.stop_reason)


def token_id_of(entry: Mapping[str, Any]) -> int:
    """The id of a log-prob entry: `token_id`, or in vLLM 0.26 the text `token_id:<id>` under `token`."""
    if "token_id" in entry:
        return int(entry["token_id"])
    return int(str(entry["token"]).removeprefix("token_id:"))


def _top(entry: Mapping[str, Any], k: int) -> tuple[tuple[int, float], ...]:
    pairs = [(token_id_of(one), finite(one["logprob"])) for one in entry.get("top_logprobs") or ()]
    return tuple(sorted(pairs, key=lambda pair: -pair[1])[:k])


def finite(value: float | None) -> float:
    """A log-prob that is safe to store: missing, NaN and minus infinity become the floor."""
    if value is None or math.isnan(value):
        return LOGPROB_FLOOR
    return max(float(value), LOGPROB_FLOOR)


def derender_request(body: Mapping[str, Any]) -> dict[str, Any]:
    """Of a chat request, what derender needs: tools and how they may be called, never the messages."""
    return {"messages": [], **{key: body[key] for key in _DERENDERED if body.get(key) is not None}}


def clean_delta(delta: Mapping[str, Any] | None) -> Delta:
    """A delta without role, nulls and empty parts, and with one entry for each tool index."""
    out: Delta = {}
    if not delta:
        return out
    for key in _PARTS:
        if delta.get(key):
            out[key] = delta[key]
    calls: dict[int, dict[str, Any]] = {}
    for entry in delta.get("tool_calls") or ():
        index = int(entry.get("index") or 0)
        call = calls.setdefault(index, {"index": index})
        if entry.get("id"):
            call["id"] = entry["id"]
        function = entry.get("function") or {}
        if function.get("name"):
            call["name"] = call.get("name", "") + function["name"]
        if function.get("arguments"):
            call["arguments"] = call.get("arguments", "") + function["arguments"]
    if calls:
        out["tool_calls"] = [_tool_call(call) for _, call in sorted(calls.items())]
    return out


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    function = {key: call[key] for key in ("name", "arguments") if key in call}
    head = {"index": call["index"]}
    if "id" in call:
        head["id"] = call["id"]
    return {**head, "function": function}


def parse_derendered(value: Any) -> tuple[Delta, State]:
    """Derender's streaming answer: the cleaned delta and the state for the next call.

    Raises:
        EngineFault: it is something else.
    """
    try:
        choices = value["chunk"]["choices"]
        state = value["stream_state"]
        if not isinstance(state, dict):
            raise EngineFault(f"derender answered without a stream_state: {value!r:.300}")
        return clean_delta(choices[0].get("delta") if choices else None), state
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise EngineFault(f"derender answered something that is not its streaming form: {value!r:.300}") from error


_METRIC = re.compile(r"^vllm:(\w+?)(?:\{([^}]*)\})? +(\S+)", re.MULTILINE)
_MAX_LORA = re.compile(r'max_lora="(\d+)"')


def parse_load(metrics: str) -> EngineLoad:
    """What `/metrics` says about load, summed over engine cores (KV usage: the fullest)."""
    running = waiting = 0.0
    usage = 0.0
    for name, _, number in _METRIC.findall(metrics):
        if name == "num_requests_running":
            running += float(number)
        elif name == "num_requests_waiting":
            waiting += float(number)
        elif name in ("kv_cache_usage_perc", "gpu_cache_usage_perc"):
            usage = max(usage, float(number))
    return EngineLoad(int(running), int(waiting), usage)


def parse_max_loras(metrics: str) -> int | None:
    """How many adapters can run at once, as `/metrics` tells; None when it does not."""
    found = [int(number) for number in _MAX_LORA.findall(metrics)]
    return max(found) if found else None
