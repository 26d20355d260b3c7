"""The routes agents use: turns in every dialect, and models, under a session's secret path or with its key.

`/s/<secret>/v1/…` is what `POST /rollouts` hands out; the plain `/v1/…` takes the same secret as `Authorization:
Bearer` or `x-api-key`.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from turngate.proxy import description
from turngate.proxy.counting import prompt_tokens
from turngate.proxy.description_messages import COUNT_DESCRIPTION, MESSAGES_DESCRIPTION
from turngate.proxy.description_responses import RESPONSES
from turngate.proxy.dialects.base import Dialect
from turngate.proxy.dialects.chat import Chat
from turngate.proxy.dialects.gemini import Gemini, model_card
from turngate.proxy.dialects.messages import Messages
from turngate.proxy.dialects.responses import Responses
from turngate.proxy.errors import BadRequest, GatewayRefusal, TooLarge, Unauthorized
from turngate.proxy.exchange import Exchange
from turngate.proxy.gateway import Gateway
from turngate.proxy.reattach import Marks, retry_key
from turngate.proxy.sessions import Session
from turngate.proxy.store.errors import StoreError
from turngate.proxy.turn_response import TurnResponse

router = APIRouter(tags=["agents"])


MESSAGES = Messages()
GEMINI_METHODS = (":generateContent", ":streamGenerateContent", ":countTokens")


@dataclass(frozen=True, slots=True)
class TurnRoute:
    """One path below `/v1` (and `/s/<secret>/v1`, `/s/<secret>`) at which a dialect takes turns.

    `description` is what the OpenAPI description says of it; see `turngate.proxy.description`.
    """

    path: str
    dialect: Dialect
    description: dict[str, Any] = field(default_factory=dict)


TURN_ROUTES: tuple[TurnRoute, ...] = (
    TurnRoute("/chat/completions", Chat(), description.CHAT),
    TurnRoute("/responses", Responses(), RESPONSES),
    TurnRoute("/messages", MESSAGES, MESSAGES_DESCRIPTION),
)
"""Every dialect whose path names nothing but itself; each is a line here and a file in `dialects/`."""

Endpoint = Callable[..., Awaitable[Response]]


def _endpoint(route: TurnRoute) -> Endpoint:
    async def take_turn(request: Request, secret: str | None = None) -> Response:
        return await turn(request, secret, route.dialect)

    name = route.path.strip("/").replace("/", "_")
    take_turn.__name__, take_turn.__doc__ = name, f"One turn, in the {route.dialect.name} dialect."
    return take_turn


for _route in TURN_ROUTES:
    _serve = _endpoint(_route)
    router.add_api_route(f"/v1{_route.path}", _serve, methods=["POST"], **_route.description)
    for _prefix in ("/s/{secret}/v1", "/s/{secret}"):
        router.add_api_route(f"{_prefix}{_route.path}", _serve, methods=["POST"], include_in_schema=False)


@router.post("/s/{secret}/v1/v1/messages/count_tokens", include_in_schema=False)
@router.post("/v1/messages/count_tokens", **COUNT_DESCRIPTION)
@router.post("/s/{secret}/v1/messages/count_tokens", include_in_schema=False)
@router.post("/s/{secret}/messages/count_tokens", include_in_schema=False)
async def count_tokens(request: Request, secret: str | None = None) -> dict[str, int]:
    """How many prompt tokens a turn in the messages dialect would have: exact, not recorded, part of no budget."""
    request.state.dialect = MESSAGES
    gateway, session = session_of(request, secret)
    raw = await read_body(request, gateway.settings.max_body_bytes)
    ask = MESSAGES.parse(raw, training=session.new.training, path=request.path_params)
    return {"input_tokens": await prompt_tokens(gateway, session, ask)}


@router.post("/s/{secret}/v1/v1/messages", include_in_schema=False)
async def messages_below_v1(request: Request, secret: str) -> Response:
    """For a client that adds `/v1` itself and was given a base URL that has it."""
    return await turn(request, secret, MESSAGES)


class AgentFront:
    """ASGI before the framework: turns, which are most requests, do without its routing and injection.

    They are the same function that the router calls, with the application's own exception handlers.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        found = _turn_route(scope)
        if found is None or scope["app"].state.gateway is None:  # the main port of several workers relays
            await self._app(scope, receive, send)
            return
        request, (secret, route) = Request(scope, receive), found
        try:
            response = await turn(request, secret or None, route.dialect)
        except (GatewayRefusal, StoreError) as error:
            kind = GatewayRefusal if isinstance(error, GatewayRefusal) else StoreError
            response = await scope["app"].exception_handlers[kind](request, error)
        await response(scope, receive, send)


@router.get("/v1/models")
@router.get("/s/{secret}/v1/models", include_in_schema=False)
@router.get("/s/{secret}/models", include_in_schema=False)
async def models(request: Request, secret: str | None = None) -> dict[str, Any]:
    """The one model a session can use: its policy, in OpenAI's words (`data`) and in Google's (`models`)."""
    gateway, session = session_of(request, secret)
    model = {
        "id": session.policy,
        "object": "model",
        "created": session.created_at_ns // 1_000_000_000,
        "owned_by": "turngate",
        "max_model_len": gateway.capabilities.max_model_len,
    }
    card = model_card(session.policy, gateway.capabilities.max_model_len)
    return {"object": "list", "data": [model], "models": [card]}


async def turn(request: Request, secret: str | None, dialect: Dialect) -> Response:
    """One turn in any dialect; whatever is refused from here on is refused in the dialect's form."""
    request.state.dialect = dialect
    gateway, session = session_of(request, secret)
    gateway.drain.check()
    raw = await read_body(request, gateway.settings.max_body_bytes)
    alone = session.new.training or session.new.upstream is not None  # one answer a request
    ask = dialect.parse(raw, training=alone, path=request.path_params)
    ask = replace(ask, messages=session.index.shared(ask.messages))
    marks = Marks.of(request.scope["headers"])
    key = retry_key(session.index.key(ask.messages, ask.tools), dialect.name, ask, marks)
    telling = gateway.tellings.find(session.tellings, key, marks)
    if telling is not None:
        gateway.sessions.join(session)
        return TurnResponse(gateway, session, dialect, ask, telling)
    gateway.sessions.enter(session)
    exchange = Exchange(gateway, session, ask, request.headers)
    telling = gateway.tellings.begin(session.tellings, key, exchange.id, int(time.time()))
    return TurnResponse(gateway, session, dialect, ask, telling, exchange)


def add_agent_routes(app: FastAPI) -> None:
    """Let an application with a gateway of its own serve agents."""
    app.include_router(router)
    app.add_middleware(AgentFront)


def dialect_at(path: str) -> Dialect | None:
    """The dialect that is spoken at a path, for what is refused before any route is reached."""
    if path.endswith("/messages/count_tokens"):
        return MESSAGES
    if path.endswith(GEMINI_METHODS):
        return Gemini()
    return next((route.dialect for route in TURN_ROUTES if path.endswith(route.path)), None)


def _turn_route(scope: Scope) -> tuple[str, TurnRoute] | None:
    """The secret in the path of a turn, empty where the path has none, and its route; None for any other request."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return None
    path: str = scope["path"]
    for route in TURN_ROUTES:
        if path == f"/v1{route.path}":
            return "", route
        if path.startswith("/s/") and path.endswith(route.path):
            secret = path.removeprefix("/s/").removesuffix(route.path).removesuffix("/v1")
            return (secret, route) if secret and "/" not in secret else None
    return None


def session_of(request: Request, secret: str | None) -> tuple[Gateway, Session]:
    """The gateway and the open session that a request belongs to.

    Raises:
        GatewayRefusal: no key, or none of an open session.
    """
    gateway: Gateway = request.app.state.gateway
    return gateway, gateway.sessions.by_secret(secret_of(request, secret))


def secret_of(request: Request, in_path: str | None) -> str:
    """The secret that a request carries.

    Raises:
        Unauthorized: none.
    """
    if in_path is not None and request.scope["path"].startswith("/s/"):  # never in the query: that ends up in logs
        return in_path
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    secret: str | None = key.strip() if kind.lower() == "bearer" else None
    secret = secret or request.headers.get("x-api-key") or request.headers.get("x-goog-api-key")
    if not secret and "/models/" in request.scope["path"]:  # Google's own way; the query is not logged here
        secret = request.query_params.get("key")
    if not secret:
        raise Unauthorized("send the session's api_key as `Authorization: Bearer`, or use its base_url")
    return secret


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """The whole request body.

    Raises:
        TooLarge: it exceeds `limit_bytes`.
        BadRequest: the client went away before its end.
    """
    pieces, size = [], 0
    try:
        async for piece in request.stream():
            size += len(piece)
            if size > limit_bytes:
                raise TooLarge(f"the body exceeds {limit_bytes} bytes; raise --max-body-bytes if this is meant to be")
            pieces.append(piece)
    except ClientDisconnect as error:
        raise BadRequest("the client left before the end of its body", code="client_gone") from error
    return b"".join(pieces)
