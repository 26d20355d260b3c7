"""Gemini's routes: the model and the method stand in the path, so they are no line of `agent_routes.TURN_ROUTES`.

Under a session's secret path, or with its key as `x-goog-api-key` or `?key=`. The key must never reach a log.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from turngate.proxy.agent_routes import read_body, session_of, turn
from turngate.proxy.counting import count_tokens
from turngate.proxy.dialects.gemini import Gemini
from turngate.proxy.errors import NotFound
from turngate.proxy.gateway import Gateway
from turngate.proxy.sessions import Session

router = APIRouter(tags=["agents"], include_in_schema=False)

PREFIXES = ("/v1beta", "/v1", "/s/{secret}/v1beta", "/s/{secret}/v1", "/s/{secret}/v1/v1beta")
"""The last is what the SDK makes of a rollout's `base_url` as it is."""

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
    tokens = await count_tokens(gateway, session, ask)
    return {"totalTokens": tokens, "promptTokensDetails": [{"modality": "TEXT", "tokenCount": tokens}]}


async def models(request: Request, secret: str | None = None) -> dict[str, Any]:
    """The one model a session can use: its policy."""
    request.state.dialect = WHOLE
    return {"models": [_model(*session_of(request, secret))]}


async def model(request: Request, model: str, secret: str | None = None) -> dict[str, Any]:
    """A model by name: the session's policy, whatever agents call it is answered by it all the same."""
    request.state.dialect = WHOLE
    gateway, session = session_of(request, secret)
    if ":" in model:
        raise NotFound(f"models/{model}: there is no such method to GET", code="no_such_route")
    return {**_model(gateway, session), "name": f"models/{model}"}


def _model(gateway: Gateway, session: Session) -> dict[str, Any]:
    window = gateway.capabilities.max_model_len
    return {
        "name": f"models/{session.policy}",
        "version": "1",
        "displayName": session.policy,
        "inputTokenLimit": window,
        "outputTokenLimit": window,
        "supportedGenerationMethods": ["generateContent", "streamGenerateContent", "countTokens"],
    }


METHODS = {
    "generateContent": generate_content,
    "streamGenerateContent": stream_generate_content,
    "countTokens": count,
}

for _prefix in PREFIXES:
    for _method, _serve in METHODS.items():
        router.add_api_route(f"{_prefix}/models/{{model:path}}:{_method}", _serve, methods=["POST"])
    if _prefix.endswith("beta"):
        router.add_api_route(f"{_prefix}/models", models, methods=["GET"])
        router.add_api_route(f"{_prefix}/models/{{model:path}}", model, methods=["GET"])
