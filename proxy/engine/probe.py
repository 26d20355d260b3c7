"""Finding out what an engine can do, once a replica, with small real calls.

Version numbers are not asked: options, builds and forks differ, answers do not lie. It must leave no trace in the
engine but a few tokens.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from turngate.proxy.engine.errors import EngineError, EngineRefused, EngineUnavailable
from turngate.proxy.engine.http import EngineHttp
from turngate.proxy.engine.types import Capabilities, GenerateCall, LogprobsMode, Rendered
from turngate.proxy.engine.whole_derender import parse_whole
from turngate.proxy.engine.wire import (
    clean_delta,
    generate_body,
    parse_chunk,
    parse_max_loras,
    parse_rendered,
)
from turngate.proxy.turns import IntArray

DERENDER_TAIL_TOKENS = 8
# How far log-probs at temperature 1 and 2 must differ, in nats, to be of the sampled distribution; below the second
# number they are the raw ones. Between the two the prompt was too flat to tell.
_PROCESSED_ABOVE = 0.1
_RAW_BELOW = 0.02
# Each is answered with near certainty by any instruction-tuned model; more than one, in case one of them is not.
_PEAKED = ("Repeat exactly this and nothing else: one two three", "What is 2 + 2? Answer with one digit.", "Hi")
_HISTORY = (
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "<think>\nA greeting.\n</think>\n\nHello!", "reasoning": "A greeting."},
    {"role": "user", "content": "And now?"},
)
_SAMPLE = 'I see.\n</think>\n\nNow <tool_call>\n{"name": "probe", "arguments": {"a": 1}}\n</tool_call>'
# What the parsers whose markers `text_ahead` knows take for a call, and what other parsers would and those do not.
_KNOWN_CALLS = (
    'Now <tool_call>\n{"name": "probe", "arguments": {"a": 1}}\n</tool_call>',
    "Now <tool_call>\n<function=probe>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
)
_NO_CALLS = (
    '{"name": "probe", "arguments": {"a": 1}}',
    "[probe(a=1)]",
    'So [TOOL_CALLS]functools[{"name": "probe"}]\n```json\n[{"name": "probe", "arguments": {"a": 1}}]\n```\nDone.',
)
_TOOLS = ({"type": "function", "function": {"name": "probe", "parameters": {"type": "object", "properties": {}}}},)


async def probe_engine(http: EngineHttp, url: str, render_url: str) -> Capabilities:
    """The capabilities of the engine at `url`, with render and derender at `render_url`.

    Raises:
        EngineUnavailable: it does not answer, or serves no model.
    """
    model, max_model_len = await _model(http, url)
    prompts = await _prompts(http, render_url, model)
    generates = await _exists(http, f"{url}/inference/v1/generate")
    has_parser = await _has_parser(http, render_url, model)
    streams = has_parser != "whole"
    if has_parser == "whole":
        has_parser = await _whole_has_parser(http, render_url, model)
    exact = prompts is not None and generates and has_parser is not None
    return Capabilities(
        model=model,
        max_model_len=max_model_len,
        vllm_version=await _version(http, url),
        exact=exact,
        logprobs_mode=await _logprobs_mode(http, url, model, prompts) if exact and prompts else "unknown",
        derender_tail_tokens=await _derender_tail(http, render_url, model, prompts, bool(has_parser))
        if exact and prompts and streams
        else None,
        derender_streams=streams,
        runtime_lora=await _exists(http, f"{url}/v1/load_lora_adapter"),
        max_loras=await _max_loras(http, url),
        has_parser=bool(has_parser) if exact else await _chat_takes_tools(http, url, model),
        plain_until_marked=await _plain_until_marked(http, render_url, model, prompts, bool(has_parser))
        if exact and prompts and streams
        else False,
        takes_interval=await _takes_interval(http, url, model, prompts) if exact and prompts else False,
    )


async def _model(http: EngineHttp, url: str) -> tuple[str, int]:
    listed = await http.get(f"{url}/v1/models")
    try:
        bases = [one for one in listed["data"] if not one.get("parent")]
        return str(bases[0]["id"]), int(bases[0]["max_model_len"])
    except (KeyError, IndexError, TypeError) as error:
        raise EngineUnavailable(f"{url}/v1/models lists no model with a max_model_len: is this a vLLM?") from error


async def _version(http: EngineHttp, url: str) -> str | None:
    try:
        return str((await http.get(f"{url}/version"))["version"])
    except (EngineRefused, KeyError, TypeError, ValueError):
        return None


async def _exists(http: EngineHttp, url: str) -> bool:
    """Whether a POST endpoint is there: an empty body is refused for its content, not with 404 or 405."""
    try:
        await http.post(url, {}, timeout_s=30)
    except EngineRefused as error:
        return error.status not in (404, 405, 501)
    return True


async def _max_loras(http: EngineHttp, url: str) -> int | None:
    try:
        return parse_max_loras(await http.get_text(f"{url}/metrics"))
    except EngineRefused:
        return None


async def _prompts(http: EngineHttp, render_url: str, model: str) -> list[Rendered] | None:
    """The peaked prompts, rendered; None when there is no render endpoint."""
    out = []
    for text in _PEAKED:
        body = {"model": model, "messages": [{"role": "user", "content": text}]}
        try:
            out.append(parse_rendered(await http.post(f"{render_url}/v1/chat/completions/render", body, pure=True)))
        except EngineRefused as error:
            if error.status in (404, 405, 501):
                return None
            raise
    return out


async def _has_parser(http: EngineHttp, render_url: str, model: str) -> bool | Literal["whole"] | None:
    """Whether derender insists on a chat request, which it does with a parser.

    None when there is no derender, "whole" when it takes whole answers only.
    """
    chunk = {"request_id": "probe", "choices": [{"index": 0, "token_ids": [], "finish_reason": None}]}
    body = {"stream": True, "model": model, "generate_chunk": chunk, "prompt_token_ids": [0]}
    try:
        await http.post(f"{render_url}/v1/chat/completions/derender", body, pure=True)
    except EngineRefused as error:
        if error.status in (404, 405, 501):
            return None
        if "generate_response" in error.message:
            return "whole"
        return "chat_request" in error.message
    return False


async def _whole_has_parser(http: EngineHttp, render_url: str, model: str) -> bool:
    """Whether a derender of whole answers finds the call, or the reasoning, in an answer that has both."""
    sample = await _ids_of(http, render_url, model, _SAMPLE)
    if sample is None:
        return False
    response = {"request_id": "probe", "choices": [{"index": 0, "token_ids": sample, "finish_reason": "stop"}]}
    about = {"model": model, "messages": [], "tools": list(_TOOLS)}
    body = {"model": model, "generate_response": response, "chat_request": about}
    message = parse_whole(await http.post(f"{render_url}/v1/chat/completions/derender", body, pure=True))
    return bool(message.get("tool_calls") or message.get("reasoning"))


async def _chat_takes_tools(http: EngineHttp, url: str, model: str) -> bool:
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "tools": list(_TOOLS)}
    try:
        await http.post(f"{url}/v1/chat/completions", body)
    except EngineError:
        return False
    return True


async def _logprobs_mode(http: EngineHttp, url: str, model: str, prompts: list[Rendered]) -> LogprobsMode:
    """Compare what the engine reports for the same tokens at temperature 1 and 2, on the same prompt."""
    raw = False
    for number, prompt in enumerate(prompts):
        at = [await _top_at(http, url, model, prompt.ids, t, f"probe-{number}-{t}") for t in (1.0, 2.0)]
        shared = at[0].keys() & at[1].keys()
        if not shared:
            continue
        gap = max(abs(at[0][token] - at[1][token]) for token in shared)
        if gap > _PROCESSED_ABOVE:
            return "processed"
        raw = raw or gap < _RAW_BELOW
    return "raw" if raw else "unknown"


async def _takes_interval(http: EngineHttp, url: str, model: str, prompts: list[Rendered]) -> bool:
    """Whether generate takes a `stream_interval`; one that ignores it does no harm."""
    params = {"temperature": 1.0, "max_tokens": 1, "stream_interval": 2}
    call = GenerateCall(model, prompts[0].ids, params, {}, "probe-interval")
    try:
        await http.post(f"{url}/inference/v1/generate", generate_body(call, stream=False))
    except EngineRefused:
        return False
    return True


async def _top_at(
    http: EngineHttp, url: str, model: str, ids: IntArray, temperature: float, request_id: str
) -> dict[int, float]:
    """The likeliest first tokens and their log-probs at a temperature."""
    params = {"temperature": temperature, "top_p": 1.0, "max_tokens": 1}
    call = GenerateCall(model, ids, params, {}, request_id, top_logprobs=4)
    chunk = parse_chunk(await http.post(f"{url}/inference/v1/generate", generate_body(call, stream=False)), 4)
    if chunk is None or not chunk.top:
        return {}
    return dict(chunk.top[0])


async def _derender_tail(
    http: EngineHttp, render_url: str, model: str, prompts: list[Rendered], has_parser: bool
) -> int | None:
    """`DERENDER_TAIL_TOKENS` when derender says the same with that many last prompt ids as with all of them."""
    if not has_parser:
        return DERENDER_TAIL_TOKENS
    sample = await _ids_of(http, render_url, model, _SAMPLE)
    rendered = [*prompts[:1]]
    try:
        body = {"model": model, "messages": list(_HISTORY), "tools": list(_TOOLS)}
        rendered.append(parse_rendered(await http.post(f"{render_url}/v1/chat/completions/render", body, pure=True)))
    except EngineRefused:
        return None
    if sample is None:
        return None
    for prompt in rendered:
        full = await _derender_once(http, render_url, model, sample, prompt.ids)
        tail = await _derender_once(http, render_url, model, sample, prompt.ids[-DERENDER_TAIL_TOKENS:])
        if full is None or full != tail:
            return None
    return DERENDER_TAIL_TOKENS


async def _plain_until_marked(
    http: EngineHttp, render_url: str, model: str, prompts: list[Rendered], has_parser: bool
) -> bool:
    """Whether derender gives all text as it is until a marker that `text_ahead` knows, or an added token, appears."""
    if not has_parser:
        return True
    said = []
    for text in (*_KNOWN_CALLS, *_NO_CALLS):
        ids = await _ids_of(http, render_url, model, text)
        said.append(None if ids is None else await _derender_once(http, render_url, model, ids, prompts[0].ids))
    known, plain = said[: len(_KNOWN_CALLS)], said[len(_KNOWN_CALLS) :]
    found = any(delta is not None and "tool_calls" in delta for delta in known)
    return found and plain == [{"content": text} for text in _NO_CALLS]


async def _ids_of(http: EngineHttp, render_url: str, model: str, text: str) -> IntArray | None:
    try:
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        return np.asarray((await http.post(f"{render_url}/tokenize", body, pure=True))["tokens"], dtype=np.int32)
    except (EngineRefused, KeyError, TypeError, ValueError):
        return None


async def _derender_once(
    http: EngineHttp, render_url: str, model: str, ids: IntArray, prompt_ids: IntArray
) -> dict[str, Any] | None:
    chunk = {"request_id": "probe", "choices": [{"index": 0, "token_ids": ids, "finish_reason": "stop"}]}
    body = {
        "stream": True,
        "model": model,
        "generate_chunk": chunk,
        "chat_request": {"model": model, "messages": [], "tools": list(_TOOLS)},
        "prompt_token_ids": prompt_ids,
    }
    try:
        value = await http.post(f"{render_url}/v1/chat/completions/derender", body, pure=True)
    except EngineRefused:
        return None
    delta = clean_delta(value["chunk"]["choices"][0]["delta"])
    for call in delta.get("tool_calls", ()):
        call.pop("id", None)
    return delta
