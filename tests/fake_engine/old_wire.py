"""What vLLM 0.26 does differently: derender of whole answers only, log-prob entries by name, no stop reason."""

from __future__ import annotations

import json
import time
from typing import Any

from tests.fake_engine.engine import Engine, WireError
from tests.fake_engine.parser import parse


def derender_whole(engine: Engine, body: dict[str, Any]) -> dict[str, Any]:
    """`/v1/chat/completions/derender` of 0.26: `generate_response` to a chat completion."""
    if "generate_response" not in body:
        raise WireError(400, "1 validation error: body.generate_response Field required", "Bad Request")
    (choice,) = body["generate_response"]["choices"]
    if not choice.get("token_ids"):
        raise WireError(400, "choice 0 has empty or null token_ids")
    parsed = engine.settings.parser and body.get("chat_request") is not None
    text = engine.tokens.decode(choice["token_ids"], skip_special=not parsed)
    message: dict[str, Any] = {"role": "assistant", "content": text, "reasoning": None, "tool_calls": []}
    if parsed:
        found = parse(text, thinking=False, final=True)
        calls = []
        for i, (name, arguments) in enumerate(found.calls):
            try:
                arguments = json.dumps(json.loads(arguments), ensure_ascii=False)
            except json.JSONDecodeError:
                break  # the hermes parser of 0.26 gives the whole text as content then
            function = {"name": name, "arguments": arguments}
            calls.append({"id": f"call{i}", "type": "function", "function": function})
        if len(calls) == len(found.calls):
            message |= {"content": found.content or None, "reasoning": found.reasoning or None, "tool_calls": calls}
    return {
        "id": body["generate_response"].get("request_id"),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": body["model"],
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": choice.get("finish_reason")}],
    }


def old_choice(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice of generate in 0.26's shape."""
    out = {key: choice[key] for key in ("index", "finish_reason", "token_ids", "routed_experts")}
    logprobs = choice["logprobs"]
    if logprobs is None:
        return {**out, "logprobs": None}
    content = [
        {**_named(entry), "top_logprobs": [_named(top) for top in entry.get("top_logprobs") or ()]}
        for entry in logprobs["content"]
    ]
    return {**out, "logprobs": {"content": content}}


def _named(entry: dict[str, Any]) -> dict[str, Any]:
    return {"token": f"token_id:{entry['token_id']}", "logprob": entry["logprob"], "bytes": None}
