"""The fake's render, generate and derender bodies, in the shape of vLLM 0.32."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

import jinja2
import orjson

from tests.fake_engine.engine import Engine, Piece, WireError
from tests.fake_engine.old_wire import derender_whole, old_choice
from tests.fake_engine.parser import Parsed, deltas, parse
from tests.fake_engine.policy import logprob_content

_NO_PARSER = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
_COPIED = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_INCOMPLETE = "�"


def render(engine: Engine, body: dict[str, Any]) -> dict[str, Any]:
    """`/v1/chat/completions/render`."""
    engine.check_model(body.get("model"))
    ids = render_ids(engine, body)
    return {
        "request_id": "chatcmpl-fake",
        "token_ids": ids,
        "token_offsets": None,
        "features": None,
        "content_parts": None,
        "sampling_params": sampling_params(engine, body, len(ids)),
        "model": body.get("model"),
        "reasoning_ended": None,
        "reasoning_parser_kwargs": None,
        "return_token_ids": None,
        "output_mode": "tokens",
        "stream": bool(body.get("stream")),
        "stream_options": None,
        "cache_salt": None,
        "priority": 0,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
    }


def render_ids(engine: Engine, body: dict[str, Any]) -> list[int]:
    """Prompt ids of a chat request. Raises WireError where vLLM refuses it."""
    if body.get("stream_options") and not body.get("stream"):
        raise WireError(400, "Stream options can only be defined when `stream=True`. (parameter=stream_options)")
    tools = body.get("tools")
    if tools and body.get("tool_choice", "auto") == "auto" and not engine.settings.parser:
        raise WireError(400, _NO_PARSER)
    try:
        ids = engine.tokens.render(body["messages"], tools, **(body.get("chat_template_kwargs") or {}))
    except (jinja2.TemplateError, KeyError, TypeError, ValueError) as error:
        raise WireError(400, f"{type(error).__name__}: {error}") from error
    limit = engine.settings.max_model_len
    if len(ids) > limit:
        raise WireError(
            400,
            f"This model's maximum context length is {limit} tokens. However, your prompt contains at least "
            f"{limit + 1} input tokens. (parameter=input_tokens, value={limit + 1})",
        )
    return ids


def sampling_params(engine: Engine, body: dict[str, Any], prompt_tokens: int) -> dict[str, Any]:
    """Resolved sampling parameters, with vLLM's defaults and the keys it writes."""
    defaults = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "temperature": 1.0}
    params: dict[str, Any] = {**defaults, "top_p": 1.0, "min_p": 0.0}
    params |= {key: body[key] for key in (*_COPIED, "seed") if body.get(key) is not None}
    limit = engine.settings.max_model_len
    asked = next((body[key] for key in ("max_completion_tokens", "max_tokens") if body.get(key) is not None), limit)
    if asked > limit:
        raise WireError(400, f"max_tokens={asked} cannot be greater than max_model_len={limit}.")
    stop = body.get("stop") or []
    params |= {"stop": [stop] if isinstance(stop, str) else stop, "stop_token_ids": body.get("stop_token_ids") or []}
    params["max_tokens"] = max(min(asked, limit - prompt_tokens), 1)
    if body.get("tools"):
        params["skip_special_tokens"] = False
    params |= {"output_kind": 2, "skip_clone": True, "bad_words": [], "skip_reading_prefix_cache": False}
    if params["stop"]:
        params["output_text_buffer_length"] = max(map(len, params["stop"])) - 1
    return params


def check_generate(engine: Engine, body: dict[str, Any]) -> tuple[str, list[int], dict[str, Any]]:
    """Model, prompt and parameters of a generate request. Raises WireError where vLLM refuses it."""
    model = engine.check_model(body.get("model"))
    ids, params = body.get("token_ids"), body.get("sampling_params")
    if not ids or not isinstance(params, dict):
        raise WireError(400, "2 validation errors: token_ids and sampling_params are required", "Bad Request")
    return model, ids, params


async def generate_stream(engine: Engine, body: dict[str, Any]) -> AsyncGenerator[bytes, None]:
    """Events of `/inference/v1/generate` with `stream`."""
    model, ids, params = check_generate(engine, body)
    request_id = f"generate-tokens-{body.get('request_id', 'none')}"
    try:
        answer = engine.complete(ids, params)
    except WireError as error:
        # vLLM has answered 200 by the time it looks at the length, so the refusal comes in the stream.
        yield event({"error": error_of(error)})
        yield b"data: [DONE]\n\n"
        return
    async for piece in engine.pieces(request_id, answer, params):
        if piece.error:
            yield event({"error": error_of(WireError(500, piece.error, "InternalServerError"))})
            break
        choice = _choice(engine, piece, len(ids), model, params)
        yield event({"request_id": request_id, "usage": None, "output_mode": "tokens", "choices": [choice]})
    if (body.get("stream_options") or {}).get("include_usage"):
        usage = usage_of(len(ids), len(answer.ids))
        yield event({"request_id": request_id, "usage": usage, "output_mode": "tokens", "choices": []})
    yield b"data: [DONE]\n\n"


async def generate_whole(engine: Engine, body: dict[str, Any]) -> dict[str, Any]:
    """`/inference/v1/generate` without `stream`; knows `prompt_logprobs`, for rescoring."""
    model, ids, params = check_generate(engine, body)
    request_id = f"generate-tokens-{body.get('request_id', 'none')}"
    answer = engine.complete(ids, params)
    async for piece in engine.pieces(request_id, answer, params, whole=True):
        if piece.error:
            raise WireError(500, piece.error, "InternalServerError")
    whole = Piece(answer.ids, 0, answer.finish_reason, answer.stop_reason)
    return {
        "request_id": request_id,
        "model": model,
        "created": int(time.time()),
        "usage": usage_of(len(ids), len(answer.ids))
        | {"prompt_tokens_details": None, "completion_tokens_details": None},
        "prompt_logprobs": _prompt_logprobs(engine, ids, model, params),
        "prompt_token_id_logprobs": None,
        "prompt_token_ids": None,
        "mm_placeholders": None,
        "metrics": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "output_mode": "tokens",
        "choices": [_choice(engine, whole, len(ids), model, params)],
    }


async def completion(engine: Engine, body: dict[str, Any]) -> dict[str, Any]:
    """`/v1/completions` of a prompt of ids, whole: what rescoring uses."""
    params = {"max_tokens": 16, **{key: body[key] for key in ("max_tokens", "prompt_logprobs") if key in body}}
    request = {"model": body.get("model"), "token_ids": body.get("prompt"), "sampling_params": params}
    answer = await generate_whole(engine, request)
    choice = answer["choices"][0]
    out = {"index": 0, "text": engine.tokens.decode(choice["token_ids"], skip_special=True), "logprobs": None}
    out |= {key: choice[key] for key in ("finish_reason", "stop_reason", "token_ids")}
    out |= {"prompt_logprobs": answer["prompt_logprobs"], "prompt_token_ids": None}
    head = {"id": "cmpl-fake", "object": "text_completion", "created": answer["created"], "model": answer["model"]}
    return head | {"choices": [out], "usage": answer["usage"]}


def derender(engine: Engine, body: dict[str, Any]) -> dict[str, Any]:
    """`/v1/chat/completions/derender`, streaming form."""
    if engine.settings.old_wire:
        return derender_whole(engine, body)
    if body.get("stream") is not True or "generate_chunk" not in body:
        raise WireError(400, "3 validation errors: this fake derenders the streaming form only", "Bad Request")
    engine.check_model(body.get("model"))
    if engine.settings.parser:
        for key in ("chat_request", "prompt_token_ids"):
            if body.get(key) is None:
                raise WireError(400, f"{key} is required when a tool or reasoning parser is configured.")
    state = body.get("stream_state") or _new_state()
    choices = body["generate_chunk"]["choices"]
    choice = choices[0] if choices else {"index": 0}
    new = choice.get("token_ids") or []
    old: list[int] = state["output_token_ids"]
    final = choice.get("finish_reason") is not None
    ids = [*state["last_tool_call_ids"]]
    thinking = _thinking(engine, body.get("prompt_token_ids") or [])
    before = _parsed(engine, old, thinking, final=False)
    delta = deltas(before, _parsed(engine, [*old, *new], thinking, final=final), ids)
    streamed = state["tools_streamed"] or "tool_calls" in delta
    if not state["role_sent"]:
        delta["role"] = "assistant"
    finish = "tool_calls" if final and streamed else choice.get("finish_reason")
    lens = [*state["output_chunk_lens"], len(new)] if new else state["output_chunk_lens"]
    state = state | {"role_sent": True, "output_token_ids": [*old, *new], "output_chunk_lens": lens}
    state |= {"tools_streamed": streamed, "last_tool_call_ids": ids}
    out = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, "stop_reason": None}
    chunk = {
        "id": body["generate_chunk"].get("request_id"),
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": body.get("model") or engine.settings.model,
        "choices": [out | {"token_ids": None}] if choices else [],
        **dict.fromkeys(("usage", "system_fingerprint", "prompt_token_ids", "prompt_text", "metrics")),
    }
    return {"chunk": chunk, "stream_state": state}


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def error_of(error: WireError) -> dict[str, Any]:
    """vLLM's error object."""
    return {"message": error.message, "type": error.kind, "param": None, "code": error.status}


def usage_of(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """vLLM's usage."""
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "total_tokens": total, "completion_tokens": completion_tokens}


def _choice(engine: Engine, piece: Piece, prompt_tokens: int, model: str, params: dict[str, Any]) -> dict[str, Any]:
    spans = [{"version": "default", "start": 0, "end": piece.start + len(piece.ids)}]
    choice = {
        "index": 0,
        "finish_reason": piece.finish_reason,
        "stop_reason": piece.stop_reason,
        "token_ids": piece.ids,
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": spans if piece.finish_reason else None,
        "logprobs": engine.logprobs(piece, prompt_tokens, model, params),
    }
    return old_choice(choice) if engine.settings.old_wire else choice


def _prompt_logprobs(
    engine: Engine, ids: list[int], model: str, params: dict[str, Any]
) -> list[dict[str, Any] | None] | None:
    if params.get("prompt_logprobs") is None:
        return None
    out: list[dict[str, Any] | None] = [None]
    for entry in logprob_content(ids[1:], 1, model, 1.0, 0, engine.tokens.vocab_tokens):
        value = {"logprob": entry["logprob"], "rank": entry["rank"], "decoded_token": None}
        out.append({str(entry["token_id"]): value})
    return out


def _new_state() -> dict[str, Any]:
    return {
        "prev_tokens": [],
        "prefix_offset": 0,
        "read_offset": 0,
        "role_sent": False,
        "logprob_context_token_ids": [],
        "logprob_text_offset": 0,
        "output_token_ids": [],
        "output_chunk_lens": [],
        "tools_streamed": False,
        "last_tool_call_ids": [],
    }


def _thinking(engine: Engine, prompt_tail: list[int]) -> bool:
    return engine.settings.parser and engine.tokens.decode(prompt_tail).rstrip().endswith("<think>")


def _parsed(engine: Engine, ids: list[int], thinking: bool, *, final: bool) -> Parsed:
    text = engine.tokens.decode(ids, skip_special=not engine.settings.parser).rstrip(_INCOMPLETE)
    if not engine.settings.parser:
        return Parsed("", text, ())
    return parse(text, thinking=thinking, final=final)
