"""OpenAI chat completions: the body an agent sends, and the bodies and stream events it gets.

Pure translation: what a field means is decided by the exchange and by `sampling.py`. No token of a stop string and no
server detail may pass here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from turngate.proxy.ask import Answer, Ask
from turngate.proxy.errors import BadRequest, GatewayRefusal
from turngate.proxy.plain import TooDeep, check_depth, mend_escapes
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


class Chat:
    """See `turngate.proxy.dialects.base.Dialect`."""

    name = "chat"

    def parse(self, raw: bytes, *, training: bool, path: Mapping[str, str]) -> Ask:
        """The ask in a request body."""
        return parse(raw, training=training)

    def completion(self, turn_id: str, model: str, created_s: int, ask: Ask, answer: Answer) -> dict[str, Any]:
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

    def events(self, turn_id: str, model: str, created_s: int, ask: Ask) -> Events:
        """The events of a streamed answer."""
        return Events(turn_id, model, created_s, include_usage=ask.include_usage)

    def refusal(self, refusal: GatewayRefusal) -> dict[str, Any]:
        """OpenAI's error object."""
        return refusal.body()


def parse(raw: bytes, *, training: bool) -> Ask:
    """The ask in a request body.

    Raises:
        BadRequest: not JSON, or a field is wrong; the message names it.
    """
    body = json_body(raw)
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object with messages")
    messages = _messages(body.get("messages"))
    tools = _tools(body.get("tools"))
    options = {} if body.get("stream_options") is None else body["stream_options"]
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


class Events:
    """The stream events of one answer, as server-sent event bytes."""

    def __init__(self, turn_id: str, model: str, created_s: int, *, include_usage: bool = False) -> None:
        self._include_usage = include_usage
        self._head = {
            "id": f"chatcmpl-{turn_id}",
            "object": "chat.completion.chunk",
            "created": created_s,
            "model": model,
        }

    def keepalive(self) -> bytes:
        """A comment, which OpenAI's clients skip."""
        return b": keep-alive\n\n"

    def start(self, prompt_tokens: int | None) -> None:
        """Usage stands at the end here."""

    def delta(self, delta: Mapping[str, Any]) -> bytes:
        """One piece of the message."""
        return self._choice(delta, None)

    def end(self, answer: Answer) -> bytes:
        """The finish reason, the usage where it is wanted (an event without choices), and the end mark."""
        last = self._choice({}, answer.finish_reason)
        if self._include_usage:
            last += self._event({"choices": [], "usage": answer.usage.openai()})
        return last + b"data: [DONE]\n\n"

    def error(self, refusal: GatewayRefusal) -> bytes:
        """A fault after the first byte: an error object, and no `[DONE]` follows."""
        return b"data: " + orjson.dumps(refusal.body()) + b"\n\n"

    def _choice(self, delta: Mapping[str, Any], finish_reason: str | None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return self._event({"choices": [choice]})

    def _event(self, rest: Mapping[str, Any]) -> bytes:
        return b"data: " + orjson.dumps({**self._head, **rest}) + b"\n\n"


def json_body(raw: bytes) -> Any:
    """The value of a body; half characters, which agents that cut texts do send, become U+FFFD."""
    try:
        try:
            body = orjson.loads(raw)
        except orjson.JSONDecodeError:
            body = orjson.loads(mend_escapes(raw))
        check_depth(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not valid JSON (in UTF-8, not compressed): {error}") from error
    except TooDeep as error:
        raise BadRequest(f"the body's {error}") from error
    return body


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
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise BadRequest(f"messages[{i}].role is {role!r}; use one of {', '.join(sorted(ROLES))}", param="messages")
        _check_content(message.get("content"), f"messages[{i}].content")
        _check_calls(message.get("tool_calls"), f"messages[{i}].tool_calls")
        for key in ("name", "tool_call_id"):
            if not isinstance(message.get(key), str | int | float | None):
                raise BadRequest(f"messages[{i}].{key} must be a string", param="messages")
    return messages


def _check_content(content: Any, where: str) -> None:
    if not isinstance(content, str | list | None):
        raise BadRequest(f"{where} must be a string or a list of parts", param="messages")
    for i, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, str):
            continue
        if not isinstance(part, dict) or not isinstance(part.get("type"), str | None):
            raise BadRequest(f"{where}[{i}] must be an object with type, such as text", param="messages")
        if not isinstance(part.get("text"), str | None):
            raise BadRequest(f"{where}[{i}].text must be a string", param="messages")


def _check_calls(calls: Any, where: str) -> None:
    if not isinstance(calls, list | None):
        raise BadRequest(f"{where} must be a list", param="messages")
    for i, call in enumerate(calls or ()):
        said = (call.get("function") or call.get("custom")) if isinstance(call, dict) else None
        if not isinstance(said, dict) or not isinstance(said.get("name"), str):
            raise BadRequest(f"{where}[{i}] must be an object with function.name", param="messages")
        if not isinstance(said.get("arguments"), str | dict | None):
            raise BadRequest(f"{where}[{i}].function.arguments must be a string of JSON", param="messages")
        if not isinstance(call.get("id"), str | int | float | None):
            raise BadRequest(f"{where}[{i}].id must be a string", param="messages")


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list):
        raise BadRequest("tools must be a list", param="tools")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequest(f"tools[{i}] must be an object with function.name", param="tools")
        if not isinstance(function.get("description"), str | None):
            raise BadRequest(f"tools[{i}].function.description must be a string", param="tools")
        if not isinstance(function.get("parameters"), dict | None):
            raise BadRequest(f"tools[{i}].function.parameters must be an object", param="tools")
    return tools
