"""The FastAPI application: routes, health, and one place where every refusal becomes an OpenAI-shaped answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException

from turngate.proxy import admin, agent_routes, gemini_routes, wire
from turngate.proxy import errors as refusals
from turngate.proxy.control import Control
from turngate.proxy.description import describe
from turngate.proxy.drain import Drain
from turngate.proxy.engine.errors import EngineError
from turngate.proxy.keys import blank_keys
from turngate.proxy.metrics import Metrics
from turngate.proxy.settings import GatewaySettings
from turngate.proxy.store import errors as store_errors
from turngate.proxy.vitals import settle_garbage
from turngate.proxy.workers import front

STORE_STATUS: dict[type[store_errors.StoreError], type[refusals.GatewayRefusal]] = {
    store_errors.NotFound: refusals.NotFound,
    store_errors.StaleLease: refusals.Conflict,
    store_errors.Conflict: refusals.Conflict,
    store_errors.Invalid: refusals.BadRequest,
    store_errors.StoreFull: refusals.StoreTrouble,
}


class Serving(Protocol):
    """What an application serves: the administration side, or one worker."""

    metrics: Metrics
    drain: Drain

    async def missing(self) -> list[str]:
        """What keeps turns from being served now, in words; empty when nothing does."""

    async def exposition(self) -> str:
        """Metrics in Prometheus' text format."""


def build_app(settings: GatewaySettings, main_port: int = 0) -> FastAPI:
    """The application of the main port; the gateway opens with its lifespan and closes with it.

    Why it could not open is in `app.state.failure`, in words. Several workers take the ports after `main_port`.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            control = await Control.open(settings, main_port)
        except (EngineError, refusals.GatewayRefusal, store_errors.StoreError, OSError) as error:
            app.state.failure = _words(error)
            raise
        app.state.control, app.state.gateway, app.state.serving = control, control.gateway, control
        settle_garbage()
        try:
            yield
        finally:
            await control.close()

    app = new_app(lifespan)
    if settings.workers == 1:
        agent_routes.add_agent_routes(app)
        app.include_router(gemini_routes.router)
    else:
        app.include_router(front.router)  # relays what is described here: to agents the port is like any other
        app.openapi = lambda: describe(app, agent_routes.router.routes)  # type: ignore[method-assign]
    app.include_router(admin.router)
    return app


def _words(error: Exception) -> str:
    """What went wrong with a file without its number."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


def new_app(lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]]) -> FastAPI:
    """What all applications of a gateway have: health, metrics, and the form of a refusal.

    `lifespan` sets `app.state.serving`.
    """
    app = FastAPI(title="Turngate", lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.openapi = lambda: describe(app)  # type: ignore[method-assign]
    app.add_api_route("/healthz", healthz, methods=["GET", "HEAD"], include_in_schema=False)
    app.add_api_route("/readyz", readyz, methods=["GET", "HEAD"], include_in_schema=False)
    app.add_api_route("/metrics", metrics, methods=["GET"], include_in_schema=False)
    app.add_exception_handler(refusals.GatewayRefusal, _refused)
    app.add_exception_handler(store_errors.StoreError, _store_refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _failed)
    return app


async def healthz() -> PlainTextResponse:
    """The process is up."""
    return PlainTextResponse("ok")


async def readyz(request: Request) -> JSONResponse:
    """Whether turns can be served now: an engine was probed and is healthy, the store can be written."""
    serving: Serving = request.app.state.serving
    missing = await serving.missing()
    return JSONResponse({"ready": not missing, "missing": missing}, status_code=503 if missing else 200)


async def metrics(request: Request) -> PlainTextResponse:
    """Prometheus' text format."""
    serving: Serving = request.app.state.serving
    return PlainTextResponse(await serving.exposition(), media_type="text/plain; version=0.0.4")


def _answer(request: Request, refusal: refusals.GatewayRefusal) -> JSONResponse:
    request.app.state.serving.metrics.refusal(refusal.code)
    headers = {wire.API_HEADER: wire.API_VERSION}
    if refusal.retry_after_s is not None:
        headers["retry-after"] = str(refusal.retry_after_s)
    dialect = getattr(request.state, "dialect", None) or agent_routes.dialect_at(request.url.path)
    body = refusal.body() if dialect is None else dialect.refusal(refusal)
    return JSONResponse(body, status_code=refusal.status, headers=headers)


async def _refused(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, refusals.GatewayRefusal)
    return _answer(request, error)


async def _store_refused(request: Request, error: Exception) -> JSONResponse:
    kind = next((STORE_STATUS[c] for c in type(error).__mro__ if c in STORE_STATUS), refusals.StoreTrouble)
    return _answer(request, kind(str(error)))


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    words = "; ".join(f"{'.'.join(str(x) for x in item['loc'])}: {item['msg']}" for item in found[:5])
    if found[0]["type"] == "json_invalid":
        words = f"the body is not valid JSON: {found[0]['ctx']['error']} at character {found[0]['loc'][-1]}"
    elif isinstance(error.body, bytes):  # not read as JSON, since it was not said to be
        words = "the body was not read as JSON: send it with `Content-Type: application/json`"
    return _answer(request, refusals.BadRequest(words))


async def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, refusals.GatewayRefusal):  # FastAPI's words for whatever a body's reading raised
        return _answer(request, error.__cause__)
    method = request.method if request.method in METHODS else "a request"  # a line written wrongly may hold a key
    path = "/s/…" if request.url.path.startswith("/s/") else blank_keys(request.url.path)
    refusal = refusals.GatewayRefusal(f"{method} {path}: {error.detail}")
    refusal.status = error.status_code
    refusal.code = "no_such_route" if error.status_code in (404, 405) else "invalid_request"
    answer = _answer(request, refusal)
    answer.headers.update(error.headers or {})
    return answer


async def _failed(request: Request, error: Exception) -> JSONResponse:
    """The last fence: Starlette logs the trace after this answer."""
    return _answer(request, refusals.Failed("the gateway failed on this request; its log has the cause"))
