"""Gemini's routes: the model and the method stand in the path, so they are no line of `agent_routes.TURN_ROUTES`.

Under a session's secret path, or with its key as `x-goog-api-key` or `?key=`. The key must never reach a log.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from turngate.proxy.agent_routes import read_body, session_of, turn
from turngate.proxy.counting import prompt_tokens
from turngate.proxy.dialects.gemini import Gemini, model_card
from turngate.proxy.errors import NotFound

router = APIRouter(tags=["agents"], include_in_schema=False)

VERSIONS = ("v1beta", "v1")
PREFIXES = tuple(f"{root}/{version}" for root in ("", "/s/{secret}", "/s/{secret}/v1") for version in VERSIONS)
"""The last two are what the SDK makes of a rollout's `base_url` as it is."""

WHOLE, EVENTS, ARRAY = Gemini("whole"), Gemini("events"), Gemini("array")


async def generate_content(request: Request, secret: str | None = None) -> Response:
    """One turn, whole."""
    return await turn(request, secret, WHOLE)


async def stream_generate_content(request: Request, secret: str | None = None) -> Response:
    """One turn, as server-sent events with `alt=sse`, else as one growing JSON array."""
    return await turn(request, secret, EVENTS if request.query_params.get("alt") == "sse" else ARRAY)


async def count(request: Request, secret: str | None = None) -> dict[str, Any]:
    """How many tokens the prompt of these contents has now, recorded history included."""
    request.state.dialect = WHOLE
    gateway, session = session_of(request, secret)
    raw = await read_body(request, gateway.settings.max_body_bytes)
    ask = WHOLE.parse(raw, training=session.new.training, path=request.path_params)
    tokens = await prompt_tokens(gateway, session, ask)
    return {"totalTokens": tokens, "promptTokensDetails": [{"modality": "TEXT", "tokenCount": tokens}]}


async def models(request: Request, secret: str | None = None) -> dict[str, Any]:
    """The one model a session can use: its policy."""
    request.state.dialect = WHOLE
    gateway, session = session_of(request, secret)
    return {"models": [model_card(session.policy, gateway.capabilities.max_model_len)]}


async def model(request: Request, model: str, secret: str | None = None) -> dict[str, Any]:
    """A model by name: the session's policy, whatever agents call it is answered by it all the same."""
    request.state.dialect = WHOLE
    gateway, session = session_of(request, secret)
    if ":" in model:
        raise NotFound(f"models/{model}: there is no such method to GET", code="no_such_route")
    return {**model_card(session.policy, gateway.capabilities.max_model_len), "name": f"models/{model}"}


METHODS = {
    "generateContent": generate_content,
    "streamGenerateContent": stream_generate_content,
    "countTokens": count,
}

for _prefix in PREFIXES:
    for _method, _serve in METHODS.items():
        router.add_api_route(f"{_prefix}/models/{{model:path}}:{_method}", _serve, methods=["POST"])
    router.add_api_route(f"{_prefix}/models", models, methods=["GET"])  # plain `/v1/models` is `agent_routes.models`
    router.add_api_route(f"{_prefix}/models/{{model:path}}", model, methods=["GET"])
