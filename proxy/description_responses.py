"""What the OpenAPI description says of `POST /v1/responses`, whose body is parsed by hand.

Kept beside `description.py`, which completes it with keys and errors. It decides nothing.
"""

from __future__ import annotations

from typing import Any

from turngate.proxy.dialects.responses import EFFORTS, STATEFUL
from turngate.proxy.dialects.responses_input import TEXT_PARTS

_TEXT = {"type": "string"}
_TEXT_OR_NULL = {"type": ["string", "null"]}
_FLAG = {"type": ["boolean", "null"]}
_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"enum": sorted(TEXT_PARTS)}, "text": _TEXT},
}
_CONTENT = {"anyOf": [_TEXT, {"type": "array", "items": _PART}]}


def _item(kind: str, required: tuple[str, ...], **fields: Any) -> dict[str, Any]:
    return {"type": "object", "required": ["type", *required], "properties": {"type": {"const": kind}, **fields}}


_ROLE = {"enum": ["user", "assistant", "system", "developer"]}
_CALL = {"call_id": _TEXT, "name": _TEXT, "namespace": _TEXT_OR_NULL}
_ITEMS: list[dict[str, Any]] = [
    _item("message", ("role", "content"), role=_ROLE, content=_CONTENT),
    _item("reasoning", ()),
    _item("function_call", ("call_id", "name", "arguments"), **_CALL, arguments=_TEXT),
    _item("function_call_output", ("call_id", "output"), call_id=_TEXT, output=_CONTENT),
    _item("custom_tool_call", ("call_id", "name", "input"), **_CALL, input=_TEXT),
    _item("custom_tool_call_output", ("call_id", "output"), call_id=_TEXT, output=_CONTENT),
]
RESPONSES_REQUEST: dict[str, Any] = {
    "type": "object",
    "description": "OpenAI's responses request; keys that are not here are kept with the turn and ignored.",
    "required": ["input"],
    "properties": {
        "model": {**_TEXT_OR_NULL, "description": "any name: the session's policy answers"},
        "input": {"anyOf": [_TEXT, {"type": "array", "minItems": 1, "items": {"anyOf": _ITEMS}}]},
        "instructions": _TEXT_OR_NULL,
        "tools": {
            "type": ["array", "null"],
            "items": {"type": "object", "required": ["type"], "properties": {"type": _TEXT}},
            "description": "function, custom and namespace; other types are left out, with a flag on the turn",
        },
        "tool_choice": {"enum": ["auto", "none", None], "description": "more where turns are not trained"},
        "parallel_tool_calls": _FLAG,
        "stream": _FLAG,
        "store": {**_FLAG, "description": "nothing is kept between requests, whatever it says"},
        "background": {"enum": [False, None]},
        "include": {"type": ["array", "null"], "items": _TEXT},
        "reasoning": {
            "type": ["object", "null"],
            "properties": {"effort": {"enum": [*sorted(EFFORTS), None]}},
        },
        "text": {"type": ["object", "null"], "description": "format: text, json_object or json_schema"},
        "max_output_tokens": {"type": ["integer", "null"], "minimum": 1},
        "temperature": {"type": ["number", "null"], "minimum": 0, "maximum": 2},
        "top_p": {"type": ["number", "null"], "minimum": 0, "maximum": 1},
        **{key: {"type": "null"} for key in STATEFUL},
    },
}
_USAGE = {
    "type": "object",
    "required": ["input_tokens", "output_tokens", "total_tokens"],
    "properties": {key: {"type": "integer"} for key in ("input_tokens", "output_tokens", "total_tokens")},
}
RESPONSES_ANSWER: dict[str, Any] = {
    "type": "object",
    "description": "OpenAI's response; with `stream`, its events, the last of them response.completed or .incomplete.",
    "required": ["id", "object", "created_at", "model", "status", "output", "usage"],
    "properties": {
        "id": _TEXT,
        "object": {"const": "response"},
        "created_at": {"type": "integer"},
        "model": _TEXT,
        "status": {"enum": ["completed", "incomplete"]},
        "output": {"type": "array", "minItems": 1, "items": {"type": "object", "required": ["type", "id"]}},
        "usage": _USAGE,
    },
}
RESPONSES: dict[str, Any] = {
    "openapi_extra": {
        "requestBody": {"required": True, "content": {"application/json": {"schema": RESPONSES_REQUEST}}},
        "responses": {
            "200": {
                "description": "The answer, whole or as server-sent events",
                "content": {"application/json": {"schema": RESPONSES_ANSWER}, "text/event-stream": {}},
            }
        },
    }
}
