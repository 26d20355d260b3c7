"""OpenAI chat completions: the body an agent sends, and the bodies and stream events it gets.

Pure translation: what a field means is decided by the exchange and by `sampling.py`. No token of a stop string and no
server detail may pass here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from turngate.proxy.ask import Answer, Ask, Usage
from turngate.proxy.errors import BadRequest, GatewayRefusal
from turngate.proxy.sampling import asked_by

RENDER_KEYS = (
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "structured_outputs",
    "chat_template_kwargs",
    "reasoning_effort",
    "documents",
)
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


def parse(raw: bytes, *, training: bool) -> Ask:
    """The ask in a request body.

    Raises:
        BadRequest: not JSON, or a field is wrong; the message names it.
    """
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object with messages")
    messages = _messages(body.get("messages"))
    tools = _tools(body.get("tools"))
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise BadRequest("stream_options must be an object", param="stream_options")
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise BadRequest("model must be a string", param="model")
    kept = {key: value for key, value in body.items() if key not in ("messages", "tools", "model")}
    return Ask(
        model=model or "",
        messages=messages,
        tools=tools,
        render_body={key: body[key] for key in RENDER_KEYS if body.get(key) is not None},
        asked=asked_by(body, training=training),
        stream=_flag(body, "stream"),
        include_usage=_flag(options, "include_usage"),
        params=kept,
    )


def completion(turn_id: str, model: str, created_s: int, answer: Answer) -> dict[str, Any]:
    """The whole answer of a request that did not stream."""
    choice = {"index": 0, "message": dict(answer.message), "logprobs": None, "finish_reason": answer.finish_reason}
    return {
        "id": f"chatcmpl-{turn_id}",
        "object": "chat.completion",
        "created": created_s,
        "model": model,
        "choices": [choice],
        "usage": answer.usage.openai(),
    }


class Events:
    """The stream events of one answer, as server-sent event bytes."""

    keepalive = b": keep-alive\n\n"
    done = b"data: [DONE]\n\n"

    def __init__(self, turn_id: str, model: str, created_s: int) -> None:
        self._head = {
            "id": f"chatcmpl-{turn_id}",
            "object": "chat.completion.chunk",
            "created": created_s,
            "model": model,
        }

    def delta(self, delta: Mapping[str, Any], finish_reason: str | None = None) -> bytes:
        """One piece of the message."""
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return self._event({"choices": [choice]})

    def usage(self, usage: Usage) -> bytes:
        """The usage event, which has no choices."""
        return self._event({"choices": [], "usage": usage.openai()})

    def error(self, refusal: GatewayRefusal) -> bytes:
        """A fault after the first byte: an error object, and no `[DONE]` follows."""
        return b"data: " + orjson.dumps(refusal.body()) + b"\n\n"

    def _event(self, rest: Mapping[str, Any]) -> bytes:
        return b"data: " + orjson.dumps({**self._head, **rest}) + b"\n\n"


def _flag(source: Mapping[str, Any], key: str) -> bool:
    value = source.get(key)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise BadRequest(f"{key} must be true or false, not {value!r}", param=key)
    return value


def _messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list of at least one message", param="messages")
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise BadRequest(f"messages[{i}] must be an object with role and content", param="messages")
        if message.get("role") not in ROLES:
            raise BadRequest(
                f"messages[{i}].role is {message.get('role')!r}; use one of {', '.join(sorted(ROLES))}",
                param="messages",
            )
        content = message.get("content")
        if content is not None and not isinstance(content, str | list):
            raise BadRequest(f"messages[{i}].content must be a string or a list of parts", param="messages")
    return messages


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list):
        raise BadRequest("tools must be a list", param="tools")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequest(f"tools[{i}] must be an object with function.name", param="tools")
    return tools
