"""The fake engine on the wire: vLLM 0.32's endpoints as a starlette app."""

from __future__ import annotations

import asyncio
import pathlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tests.fake_engine import chat, exact
from tests.fake_engine.engine import Engine, WireError
from tests.fake_engine.settings import Fault

VERSION = "0.32.0"
Handler = Callable[[Request], Awaitable[Response]]
_METRICS = """vllm:num_requests_running{{engine="0",model_name="{model}"}} {running}.0
vllm:num_requests_waiting{{engine="0",model_name="{model}"}} {waiting}.0
vllm:kv_cache_usage_perc{{engine="0",model_name="{model}"}} {kv_usage}
vllm:lora_requests_info{{max_lora="{max_loras}",running_lora_adapters="",waiting_lora_adapters=""}} 1.0
"""


def make_app(engine: Engine) -> Starlette:
    """All routes over one engine."""
    posts = _posts(engine)
    gets = _gets(engine, posts)
    routes = [Route(path, handler, methods=["POST"]) for path, handler in posts.items()]
    routes += [Route(path, handler, methods=["GET"]) for path, handler in gets.items()]
    return Starlette(routes=routes, exception_handlers={WireError: _on_error, 404: _not_found})


def _posts(engine: Engine) -> dict[str, Handler]:
    settings = engine.settings

    async def generate(request: Request) -> Response:
        body = await _body(engine, request)
        if body.get("stream"):
            return await _streaming(exact.generate_stream(engine, body))
        return _json(await exact.generate_whole(engine, body))

    async def chat_completions(request: Request) -> Response:
        body = await _body(engine, request)
        if body.get("stream"):
            return await _streaming(chat.chat_stream(engine, body))
        return _json(await chat.chat_whole(engine, body))

    async def completions(request: Request) -> Response:
        return _json(await exact.completion(engine, await _body(engine, request)))

    async def render(request: Request) -> Response:
        return _json(exact.render(engine, await _body(engine, request)))

    async def derender(request: Request) -> Response:
        return _json(exact.derender(engine, await _body(engine, request)))

    async def tokenize(request: Request) -> Response:
        ids = engine.tokens.encode((await _body(engine, request))["prompt"])
        return _json({"count": len(ids), "max_model_len": settings.max_model_len, "tokens": ids, "token_strs": None})

    async def abort(request: Request) -> Response:
        for request_id in (await _body(engine, request)).get("request_ids", ()):
            if request_id in engine.running:
                engine.running[request_id].set()
        return Response()

    async def set_fault(request: Request) -> Response:
        engine.fault = Fault(**orjson.loads(await request.body()))
        return Response()

    posts: dict[str, Handler] = {"/v1/chat/completions": chat_completions, "/tokenize": tokenize}
    posts |= {"/v1/completions": completions, "/fake/fault": set_fault}
    if settings.exact:
        posts |= {"/v1/chat/completions/render": render, "/v1/chat/completions/derender": derender}
        posts |= {"/inference/v1/generate": generate, "/inference/v1/abort_requests": abort}
    if settings.runtime_lora:
        posts |= {"/v1/load_lora_adapter": _loader(engine), "/v1/unload_lora_adapter": _unloader(engine)}
    return posts


def _gets(engine: Engine, posts: Iterable[str]) -> dict[str, Handler]:
    settings = engine.settings
    paths = {path: {"post": {}} for path in posts}

    async def ok(_: Request) -> Response:
        return Response()

    async def version(_: Request) -> Response:
        return _json({"version": VERSION})

    async def models(_: Request) -> Response:
        base = _model(settings.model, None, settings.max_model_len)
        return _json({"object": "list", "data": [base, *(_model(a, settings.model, None) for a in engine.adapters)]})

    async def metrics(_: Request) -> Response:
        text = _METRICS.format(
            model=settings.model,
            running=len(engine.running),
            waiting=engine.waiting,
            kv_usage=engine.kv_usage,
            max_loras=settings.max_loras,
        )
        return Response(text, media_type="text/plain")

    async def times(_: Request) -> Response:
        return _json({"took_s": engine.took_s, "intervals": {str(one): n for one, n in engine.intervals.items()}})

    async def openapi(_: Request) -> Response:
        return _json({"openapi": "3.1.0", "paths": paths})

    return {
        "/openapi.json": openapi,
        "/health": ok,
        "/version": version,
        "/v1/models": models,
        "/metrics": metrics,
        "/fake/times": times,
    }


def _loader(engine: Engine) -> Handler:
    async def load(request: Request) -> Response:
        body = await _body(engine, request)
        name, path = body.get("lora_name"), body.get("lora_path")
        if not name or not path:
            raise WireError(400, "2 validation errors: lora_name and lora_path are required", "Bad Request")
        if name in engine.adapters:
            raise WireError(400, f"The lora adapter '{name}' has already been loaded.", "InvalidUserInput")
        if not (pathlib.Path(path) / "adapter_config.json").exists():
            raise WireError(404, f"Loading lora {name} failed: No adapter found for {path}", "NotFoundError")
        await asyncio.sleep(engine.settings.load_s)
        engine.adapters[name] = path
        engine.most_adapters = max(engine.most_adapters, len(engine.adapters))
        return Response(f"Success: LoRA adapter '{name}' added successfully.")

    return load


def _unloader(engine: Engine) -> Handler:
    async def unload(request: Request) -> Response:
        name = (await _body(engine, request)).get("lora_name")
        if not name:
            raise WireError(400, "1 validation error: lora_name is required", "Bad Request")
        if engine.adapters.pop(name, None) is None:
            raise WireError(404, f"The lora adapter '{name}' cannot be found.", "NotFoundError")
        return Response(f"Success: LoRA adapter '{name}' removed successfully.")

    return unload


async def _body(engine: Engine, request: Request) -> dict[str, Any]:
    try:
        body = orjson.loads(await request.body())
    except orjson.JSONDecodeError as error:
        raise WireError(400, f"JSON decode error: {error}") from error
    engine.requests.append((request.url.path, body))
    return body if isinstance(body, dict) else {}


async def _streaming(events: AsyncGenerator[bytes, None]) -> Response:
    """Stream `events`; what goes wrong before the first one is still an ordinary error answer."""
    first = await anext(events)

    async def all_events() -> AsyncIterator[bytes]:
        async with aclosing(events):
            yield first
            async for one in events:
                yield one

    return StreamingResponse(all_events(), media_type="text/event-stream")


def _model(name: str, parent: str | None, max_model_len: int | None) -> dict[str, Any]:
    permission = {"id": "modelperm-fake", "object": "model_permission", "created": int(time.time())}
    allowed = ("create_engine", "sampling", "logprobs", "search_indices", "view", "fine_tuning")
    permission |= {f"allow_{what}": True for what in allowed}
    permission |= {"organization": "*", "group": None, "is_blocking": False}
    head = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "vllm", "root": name}
    return head | {"parent": parent, "max_model_len": max_model_len, "permission": [permission]}


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


async def _on_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, WireError)
    return _json({"error": exact.error_of(error)}, error.status)


async def _not_found(_: Request, __: Exception) -> Response:
    return _json({"detail": "Not Found"}, 404)
