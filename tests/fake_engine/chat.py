"""The fake's plain chat completions, streamed and whole, with token ids and log-probs as vLLM adds them."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from tests.fake_engine.engine import Engine, Piece, WireError
from tests.fake_engine.exact import error_of, event, render_ids, sampling_params, usage_of
from tests.fake_engine.parser import Parsed, deltas, parse

_FINGERPRINT = "vllm-0.32.0-fake"
_NONE = Parsed("", "", ())


class _Chat:
    """One chat request on its way."""

    def __init__(self, engine: Engine, body: dict[str, Any]) -> None:
        self.engine, self.body = engine, body
        self.begun_s = time.monotonic()
        self.model = engine.check_model(body.get("model"))
        self.prompt = render_ids(engine, body)
        self.params = sampling_params(engine, body, len(self.prompt))
        if body.get("logprobs"):
            self.params["logprobs"] = body.get("top_logprobs") or 0
        self.answer = engine.complete(self.prompt, self.params)
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self.created = int(time.time())

    def parsed(self, upto: int, *, final: bool) -> Parsed:
        """The first `upto` tokens, without stop token and stop string."""
        ids = self.answer.ids[:upto]
        ended = final and self.answer.finish_reason == "stop"
        if ended and not isinstance(self.answer.stop_reason, str):
            ids = ids[:-1]
        text = self.engine.tokens.decode(ids, skip_special=not self.engine.settings.parser).rstrip("�")
        if ended and isinstance(self.answer.stop_reason, str):
            text = text.rpartition(self.answer.stop_reason)[0]
        if not self.engine.settings.parser:
            return Parsed("", text, ())
        return parse(text, thinking=False, final=final)

    def finish_reason(self, parsed: Parsed) -> str:
        """The client's finish reason."""
        return "tool_calls" if parsed.calls and self.answer.finish_reason == "stop" else self.answer.finish_reason

    def logprobs(self, piece: Piece) -> dict[str, Any] | None:
        """OpenAI's log-probs of a piece."""
        found = self.engine.logprobs(piece, len(self.prompt), self.model, self.params)
        if found is None:
            return None
        k = self.params["logprobs"]
        return {"content": [self._logprob(one, one["top_logprobs"][: k or 0]) for one in found["content"]]}

    def _logprob(self, entry: dict[str, Any], top: list[dict[str, Any]] | None) -> dict[str, Any]:
        token = self.engine.tokens.decode([entry["token_id"]])
        out: dict[str, Any] = {"token": token, "logprob": entry["logprob"], "bytes": list(token.encode())}
        if top is not None:
            out["top_logprobs"] = [self._logprob(one, None) for one in top]
        return out


async def chat_whole(engine: Engine, body: dict[str, Any]) -> dict[str, Any]:
    """A whole chat completion."""
    chat = _Chat(engine, body)
    async for piece in engine.pieces(chat.id, chat.answer, chat.params, whole=True, begun_s=chat.begun_s):
        if piece.error:
            raise WireError(500, piece.error, "InternalServerError")
    ids = chat.answer.ids
    parsed = chat.parsed(len(ids), final=True)
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content or (None if parsed.calls else "")}
    message |= dict.fromkeys(("refusal", "annotations", "audio", "function_call"))
    if parsed.calls:
        message["tool_calls"] = [
            {"id": f"chatcmpl-tool-{i:016x}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(parsed.calls)
        ]
    message["reasoning"] = parsed.reasoning or None
    exact = bool(body.get("return_token_ids"))
    choice = {
        "index": 0,
        "message": message,
        "logprobs": chat.logprobs(Piece(ids, 0, None, None)),
        "finish_reason": chat.finish_reason(parsed),
        "stop_reason": chat.answer.stop_reason,
        "token_ids": ids if exact else None,
        "routed_experts": None,
    }
    usage = usage_of(len(chat.prompt), len(ids)) | {"prompt_tokens_details": None, "completion_tokens_details": None}
    return {
        "id": chat.id,
        "object": "chat.completion",
        "created": chat.created,
        "model": chat.model,
        "choices": [choice],
        "service_tier": None,
        "system_fingerprint": _FINGERPRINT,
        "usage": usage,
        "prompt_logprobs": None,
        "prompt_token_ids": chat.prompt if exact else None,
        **dict.fromkeys(("prompt_text", "kv_transfer_params", "ec_transfer_params", "metrics")),
    }


async def chat_stream(engine: Engine, body: dict[str, Any]) -> AsyncGenerator[bytes, None]:
    """Events of a streamed chat completion."""
    chat = _Chat(engine, body)
    exact = bool(body.get("return_token_ids"))
    head = {"id": chat.id, "object": "chat.completion.chunk", "created": chat.created, "model": chat.model}
    first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    yield event(head | {"choices": [first]} | ({"prompt_token_ids": chat.prompt, "prompt_text": None} if exact else {}))
    before, call_ids = _NONE, list[str]()
    async for piece in engine.pieces(chat.id, chat.answer, chat.params, begun_s=chat.begun_s):
        if piece.error:
            yield event({"error": error_of(WireError(500, piece.error, "InternalServerError"))})
            break
        final = piece.finish_reason is not None
        now = chat.parsed(piece.start + len(piece.ids), final=final)
        delta = {key: value for key, value in deltas(before, now, call_ids).items() if value is not None}
        before = now
        choice = {"index": 0, "delta": delta, "logprobs": chat.logprobs(piece), "finish_reason": None}
        if final:
            choice |= {"finish_reason": chat.finish_reason(now), "stop_reason": piece.stop_reason}
        yield event(head | {"choices": [choice | ({"token_ids": piece.ids} if exact else {})]})
    if (body.get("stream_options") or {}).get("include_usage"):
        usage = usage_of(len(chat.prompt), len(chat.answer.ids))
        yield event(head | {"choices": [], "usage": usage, "system_fingerprint": _FINGERPRINT})
    yield b"data: [DONE]\n\n"
