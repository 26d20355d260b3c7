"""What the OpenAPI description says beyond what FastAPI sees: keys, errors, and the bodies that are parsed by hand.

Generators of clients and fuzzers read it, so every status that a route can answer stands here. It decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.routing import BaseRoute

from turngate.proxy.dialects.chat import ROLES
from turngate.proxy.wire import ErrorAnswer

WORDS = {
    400: "Wrong request; the message names the field",
    401: "No key, or not the administration key",
    404: "No such session, rollout, lease or policy",
    408: "The request did not arrive in time",
    409: "A stale lease, or a state that does not allow it",
    410: "The session is closed",
    413: "The body is too large",
    421: "The Host header names another server",
    429: "More at once than the session or the gateway allows; retry later",
    431: "The head of the request is too large",
    500: "The gateway failed; its log has the cause",
    502: "The engine failed; nothing was kept",
    503: "No engine can take the turn now; retry later",
    507: "The store is full: nothing was sampled, or what was sampled was not kept",
}
OWN_ERRORS = "x-own-errors"
"""The key under which an operation of another dialect has the schema of its errors."""

EVERYWHERE = (400, 401, 408, 413, 421, 431, 500)
AGENT = (404, 410, 429, 502, 503, 507)
ADMIN = (404, 409, 429, 502, 503, 507)

_TEXT = {"type": "string"}


def or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """`null` says the same as leaving the key out, as clients with typed bodies write it."""
    return {**schema, "type": [schema["type"], "null"]} if "type" in schema else {"anyOf": [schema, {"type": "null"}]}


_NAME = {"type": ["string", "number", "boolean", "null"]}
_PART = {"anyOf": [_TEXT, {"type": "object", "properties": {"type": or_null(_TEXT), "text": or_null(_TEXT)}}]}
_FUNCTION = {
    "type": "object",
    "required": ["name"],
    "properties": {"name": _TEXT, "arguments": {"type": ["string", "object", "null"]}},
}
_CALL = {
    "type": "object",
    "properties": {"id": _NAME, "type": {}},
    "anyOf": [{"required": [kind], "properties": {kind: _FUNCTION}} for kind in ("function", "custom")],
}
_MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": sorted(ROLES)},
        "content": {"anyOf": [_TEXT, {"type": "null"}, {"type": "array", "items": _PART}]},
        "name": _NAME,
        "tool_call_id": _NAME,
        "tool_calls": or_null({"type": "array", "items": _CALL}),
    },
}
_TOOL = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "type": {},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": _TEXT,
                "description": or_null(_TEXT),
                "parameters": or_null({"type": "object"}),
            },
        },
    },
}
_COUNT = or_null({"type": "integer", "minimum": 1, "maximum": 2**63 - 1})
CHAT_REQUEST: dict[str, Any] = {
    "type": "object",
    "description": "OpenAI's chat completions request; keys that are not here are kept with the turn and ignored.",
    "required": ["messages"],
    "properties": {
        "model": or_null({"type": "string", "description": "any name: the session's policy answers"}),
        "messages": {"type": "array", "minItems": 1, "items": _MESSAGE},
        "tools": or_null({"type": "array", "items": _TOOL}),
        "tool_choice": {"enum": ["auto", "none", None], "description": "more where turns are not trained"},
        "stream": or_null({"type": "boolean"}),
        "stream_options": or_null({"type": "object", "properties": {"include_usage": or_null({"type": "boolean"})}}),
        "max_tokens": _COUNT,
        "max_completion_tokens": _COUNT,
        "temperature": or_null({"type": "number", "minimum": 0, "maximum": 2}),
        "top_p": or_null({"type": "number", "minimum": 0, "maximum": 1}),
        "stop": or_null({"anyOf": [_TEXT | {"minLength": 1}, {"type": "array", "items": _TEXT | {"minLength": 1}}]}),
        "seed": or_null({"type": "integer", "minimum": -(2**63) + 1, "maximum": 2**63 - 1}),
        "n": {"enum": [1, None]},
    },
}
_USAGE = {
    "type": "object",
    "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
    "properties": {key: {"type": "integer"} for key in ("prompt_tokens", "completion_tokens", "total_tokens")},
}
_CHOICE = {
    "type": "object",
    "required": ["index", "message", "finish_reason"],
    "properties": {
        "index": {"const": 0},
        "message": {**_MESSAGE, "required": ["role", "content"]},
        "finish_reason": {"enum": ["stop", "length", "tool_calls"]},
    },
}
CHAT_ANSWER: dict[str, Any] = {
    "type": "object",
    "description": "OpenAI's chat completion; with `stream`, chat.completion.chunk events and `data: [DONE]`.",
    "required": ["id", "object", "created", "model", "choices", "usage"],
    "properties": {
        "id": _TEXT,
        "object": {"const": "chat.completion"},
        "created": {"type": "integer"},
        "model": _TEXT,
        "choices": {"type": "array", "minItems": 1, "maxItems": 1, "items": _CHOICE},
        "usage": _USAGE,
    },
}
CHAT: dict[str, Any] = {
    "openapi_extra": {
        "requestBody": {"required": True, "content": {"application/json": {"schema": CHAT_REQUEST}}},
        "responses": {
            "200": {
                "description": "The answer, whole or as server-sent events",
                "content": {"application/json": {"schema": CHAT_ANSWER}, "text/event-stream": {}},
            }
        },
    }
}
KEYS = {
    "sessionBearer": {"type": "http", "scheme": "bearer", "description": "a session's api_key"},
    "sessionKey": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "a session's api_key"},
    "adminKey": {"type": "http", "scheme": "bearer", "description": "the store's admin.key"},
}


def describe(app: FastAPI, more: Sequence[BaseRoute] = ()) -> dict[str, Any]:
    """The whole description, made once; `more` are routes that the application serves without having them itself."""
    if app.openapi_schema:
        return app.openapi_schema
    api = get_openapi(title=app.title, version="1", routes=[*more, *app.routes])
    api["components"]["securitySchemes"] = KEYS
    schemas = api["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas["ErrorAnswer"] = ErrorAnswer.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(schemas["ErrorAnswer"].pop("$defs"))
    for methods in api["paths"].values():
        for operation in methods.values():
            _complete(operation)
    app.openapi_schema = api
    return api


def _complete(operation: dict[str, Any]) -> None:
    """Keys and errors of one operation."""
    agent = "agents" in operation["tags"]
    operation["security"] = [{"sessionBearer": []}, {"sessionKey": []}] if agent else [{"adminKey": []}]
    operation["parameters"] = [one for one in operation.get("parameters", ()) if one["name"] != "secret"]
    answers = operation["responses"]
    answers.pop("422", None)
    schema: dict[str, Any] = {"$ref": "#/components/schemas/ErrorAnswer"}
    if (own := operation.pop(OWN_ERRORS, None)) is not None:  # what is refused before its path is looked at is OpenAI's
        schema = {"anyOf": [own, schema]}
    for status in sorted((*EVERYWHERE, *(AGENT if agent else ADMIN))):
        answers[str(status)] = {"description": WORDS[status], "content": {"application/json": {"schema": schema}}}
