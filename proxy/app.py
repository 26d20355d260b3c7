"""The FastAPI application: routes, health, and one place where every refusal becomes an OpenAI-shaped answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException

from turngate.proxy import admin, agent_routes, wire
from turngate.proxy import errors as refusals
from turngate.proxy.engine.errors import EngineError
from turngate.proxy.gateway import Gateway
from turngate.proxy.settings import GatewaySettings
from turngate.proxy.store import errors as store_errors
from turngate.proxy.vitals import process_gauges

STORE_STATUS: dict[type[store_errors.StoreError], type[refusals.GatewayRefusal]] = {
    store_errors.NotFound: refusals.NotFound,
    store_errors.StaleLease: refusals.Conflict,
    store_errors.Conflict: refusals.Conflict,
    store_errors.Invalid: refusals.BadRequest,
    store_errors.StoreFull: refusals.StoreTrouble,
}


def build_app(settings: GatewaySettings) -> FastAPI:
    """The application; the gateway opens with its lifespan and closes with it.

    Why it could not open is in `app.state.failure`, in words.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            app.state.gateway = await Gateway.open(settings)
        except (EngineError, refusals.GatewayRefusal, store_errors.StoreError, OSError) as error:
            app.state.failure = str(error)
            raise
        try:
            yield
        finally:
            await app.state.gateway.close()

    app = FastAPI(title="Turngate", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.include_router(agent_routes.router)
    app.include_router(admin.router)
    app.add_api_route("/healthz", healthz, methods=["GET"], include_in_schema=False)
    app.add_api_route("/readyz", readyz, methods=["GET"], include_in_schema=False)
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
    gateway: Gateway = request.app.state.gateway
    missing = await gateway.missing()
    return JSONResponse({"ready": not missing, "missing": missing}, status_code=503 if missing else 200)


async def metrics(request: Request) -> PlainTextResponse:
    """Prometheus' text format."""
    gateway: Gateway = request.app.state.gateway
    gauges = {
        "turngate_open_sessions": float(gateway.sessions.open_count),
        "turngate_turns_in_flight": float(gateway.drain.in_flight),
        "turngate_draining": float(gateway.drain.draining),
        "turngate_engines": float(len(gateway.replicas.all)),
        "turngate_healthy_engines": float(len(gateway.replicas.healthy)),
        "turngate_tasks": float(len(asyncio.all_tasks())),
        **process_gauges(),
        **gateway.replicas.gauges(),
    }
    return PlainTextResponse(gateway.metrics.text(gauges), media_type="text/plain; version=0.0.4")


def _answer(request: Request, refusal: refusals.GatewayRefusal) -> JSONResponse:
    request.app.state.gateway.metrics.refusal(refusal.code)
    headers = {wire.API_HEADER: wire.API_VERSION}
    if refusal.retry_after_s is not None:
        headers["retry-after"] = str(refusal.retry_after_s)
    return JSONResponse(refusal.body(), status_code=refusal.status, headers=headers)


async def _refused(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, refusals.GatewayRefusal)
    return _answer(request, error)


async def _store_refused(request: Request, error: Exception) -> JSONResponse:
    kind = next((STORE_STATUS[c] for c in type(error).__mro__ if c in STORE_STATUS), refusals.StoreTrouble)
    return _answer(request, kind(str(error)))


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    words = "; ".join(f"{'.'.join(str(x) for x in item['loc'])}: {item['msg']}" for item in error.errors()[:5])
    return _answer(request, refusals.BadRequest(words))


async def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    path = "/s/…" if request.url.path.startswith("/s/") else request.url.path
    refusal = refusals.GatewayRefusal(f"{request.method} {path}: {error.detail}")
    refusal.status = error.status_code
    refusal.code = "no_such_route" if error.status_code in (404, 405) else "invalid_request"
    return _answer(request, refusal)


async def _failed(request: Request, error: Exception) -> JSONResponse:
    """The last fence: Starlette logs the trace after this answer."""
    return _answer(request, refusals.Failed("the gateway failed on this request; its log has the cause"))
