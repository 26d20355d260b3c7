"""What the OpenAPI description says of `POST /v1/messages` and its token count, whose bodies are parsed by hand.

Kept beside `description.py`, which completes it with keys and errors. It decides nothing.
"""

from __future__ import annotations

from typing import Any

_TEXT: dict[str, Any] = {"type": "string"}
_COUNT: dict[str, Any] = {"type": "integer"}


def _block(kind: str, required: tuple[str, ...], **fields: Any) -> dict[str, Any]:
    return {"type": "object", "required": ["type", *required], "properties": {"type": {"const": kind}, **fields}}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """`null` says the same as leaving the key out."""
    return {**schema, "type": [schema["type"], "null"]} if "type" in schema else {"anyOf": [schema, {"type": "null"}]}


_TEXT_BLOCK = _block("text", ("text",), text=_TEXT)
_TEXTS = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT_BLOCK}]}
_TOOL_USE = _block("tool_use", ("id", "name", "input"), id=_TEXT, name=_TEXT, input={"type": "object"})
_THINKING = _block("thinking", ("thinking", "signature"), thinking=_TEXT, signature=_TEXT)
_OTHER_BLOCK = {
    "type": "object",
    "required": ["type"],
    "properties": {"type": {"type": "string", "not": {"const": "text"}}},
    "description": "what has no meaning in its place is left out, with a flag on the turn",
}
_BLOCKS: list[dict[str, Any]] = [
    _TEXT_BLOCK,
    _THINKING,
    _TOOL_USE,
    _block("tool_result", ("tool_use_id",), tool_use_id=_TEXT, content=_or_null(_TEXTS), is_error={"type": "boolean"}),
    _OTHER_BLOCK,
]
_CONTENT = _or_null({"anyOf": [_TEXT, {"type": "array", "items": {"anyOf": _BLOCKS}}]})
_MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {"role": {"enum": ["user", "assistant", "system"]}, "content": _CONTENT},
}
_TOOL = {
    "anyOf": [
        {
            "type": "object",
            "required": ["name", "input_schema"],
            "properties": {
                "name": _TEXT | {"minLength": 1},
                "description": _or_null(_TEXT),
                "input_schema": {"type": "object"},
            },
        },
        {"type": "object", "required": ["type"], "not": {"required": ["input_schema"]}},
    ]
}
MESSAGES_REQUEST: dict[str, Any] = {
    "type": "object",
    "description": "Anthropic's messages request; keys that are not here are kept with the turn and ignored.",
    "required": ["messages"],
    "properties": {
        "model": _or_null({"type": "string", "description": "any name: the session's policy answers"}),
        "messages": {
            "type": "array",
            "minItems": 1,
            "items": _MESSAGE,
            "description": "the last one must not be the assistant's",
        },
        "system": _CONTENT,
        "tools": {
            "type": ["array", "null"],
            "items": _TOOL,
            "description": "tools that Anthropic's servers run are left out, with a flag on the turn",
        },
        "tool_choice": {
            "type": ["object", "null"],
            "required": ["type"],
            "properties": {"type": {"enum": ["auto", "none"], "description": "more where turns are not trained"}},
        },
        "max_tokens": _or_null({"type": "integer", "minimum": 1, "maximum": 2**63 - 1}),
        "temperature": _or_null({"type": "number", "minimum": 0, "maximum": 2}),
        "top_p": _or_null({"type": "number", "minimum": 0, "maximum": 1}),
        "top_k": _or_null({"type": "integer", "minimum": -1, "maximum": 2**31 - 1, "description": "0 and -1: all"}),
        "stop_sequences": _or_null({"type": "array", "items": _TEXT | {"minLength": 1}}),
        "stream": _or_null({"type": "boolean"}),
        "thinking": {
            "type": ["object", "null"],
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
