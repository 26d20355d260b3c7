"""What the OpenAPI description says of `POST /v1/messages` and its token count, whose bodies are parsed by hand.

Kept beside `description.py`, which completes it with keys and errors. It decides nothing.
"""

from __future__ import annotations

from typing import Any

_TEXT = {"type": "string"}
_COUNT = {"type": "integer"}


def _block(kind: str, required: tuple[str, ...], **fields: Any) -> dict[str, Any]:
    return {"type": "object", "required": ["type", *required], "properties": {"type": {"const": kind}, **fields}}


_TEXT_BLOCK = _block("text", ("text",), text=_TEXT)
_TEXTS = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT_BLOCK}]}
_TOOL_USE = _block("tool_use", ("id", "name", "input"), id=_TEXT, name=_TEXT, input={"type": "object"})
_THINKING = _block("thinking", ("thinking", "signature"), thinking=_TEXT, signature=_TEXT)
_BLOCKS: list[dict[str, Any]] = [
    _TEXT_BLOCK,
    _THINKING,
    _TOOL_USE,
    _block("tool_result", ("tool_use_id",), tool_use_id=_TEXT, content=_TEXTS, is_error={"type": "boolean"}),
]
_MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"enum": ["user", "assistant", "system"]},
        "content": {"anyOf": [_TEXT, {"type": "array", "items": {"anyOf": _BLOCKS}}]},
    },
}
_TOOL = {
    "type": "object",
    "required": ["name", "input_schema"],
    "properties": {"name": _TEXT | {"minLength": 1}, "description": _TEXT, "input_schema": {"type": "object"}},
}
MESSAGES_REQUEST: dict[str, Any] = {
    "type": "object",
    "description": "Anthropic's messages request; keys that are not here are kept with the turn and ignored.",
    "required": ["messages"],
    "properties": {
        "model": {"type": "string", "description": "any name: the session's policy answers"},
        "messages": {
            "type": "array",
            "minItems": 1,
            "items": _MESSAGE,
            "description": "the last one must not be the assistant's",
        },
        "system": _TEXTS,
        "tools": {
            "type": "array",
            "items": _TOOL,
            "description": "tools that Anthropic's servers run are left out, with a flag on the turn",
        },
        "tool_choice": {
            "type": "object",
            "required": ["type"],
            "properties": {"type": {"enum": ["auto", "none"], "description": "more where turns are not trained"}},
        },
        "max_tokens": {"type": "integer", "minimum": 1, "maximum": 2**31 - 1},
        "temperature": {"type": "number", "minimum": 0, "maximum": 1},
        "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "top_k": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
        "stop_sequences": {"type": "array", "items": _TEXT | {"minLength": 1}},
        "stream": {"type": "boolean"},
        "thinking": {
            "type": "object",
            "required": ["type"],
            "properties": {"type": {"enum": ["enabled", "adaptive", "disabled"]}},
        },
    },
}
_ANSWER: dict[str, Any] = {
    "type": "object",
    "description": "Anthropic's message; with `stream`, its events from `message_start` to `message_stop`.",
    "required": ["id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"],
    "properties": {
        "id": _TEXT,
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "model": _TEXT,
        "content": {"type": "array", "minItems": 1, "items": {"anyOf": [_TEXT_BLOCK, _THINKING, _TOOL_USE]}},
        "stop_reason": {"enum": ["end_turn", "max_tokens", "tool_use", "stop_sequence"]},
        "stop_sequence": {"type": ["string", "null"]},
        "usage": {
            "type": "object",
            "required": ["input_tokens", "output_tokens"],
            "properties": {"input_tokens": _COUNT, "output_tokens": _COUNT},
        },
    },
}
_ERROR = {
    "type": "object",
    "description": "Anthropic's error, with the code and the field of ours.",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message", "param", "code"],
            "properties": {"type": _TEXT, "message": _TEXT, "code": _TEXT},
        },
    },
}
_BODY = {"required": True, "content": {"application/json": {"schema": MESSAGES_REQUEST}}}
MESSAGES_DESCRIPTION: dict[str, Any] = {
    "openapi_extra": {
        "x-own-errors": _ERROR,
        "requestBody": _BODY,
        "responses": {
            "200": {
                "description": "The answer, whole or as server-sent events",
                "content": {"application/json": {"schema": _ANSWER}, "text/event-stream": {}},
            }
        },
    }
}
COUNT_DESCRIPTION: dict[str, Any] = {"openapi_extra": {"x-own-errors": _ERROR, "requestBody": _BODY}}
