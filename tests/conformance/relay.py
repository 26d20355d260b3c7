"""The relay between a target and its engine: it writes down what the engine is asked, and can interfere.

On a real vLLM it also decides what the model says, by a grammar that allows one answer alone, so that the same tests
hold for a scripted engine and a real one. It must never change an answer unless a test asked for that.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any, Self

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

GENERATIONS = ("/v1/chat/completions", "/v1/messages", "/inference/v1/generate")
Force = Callable[[str, dict[str, Any]], dict[str, Any]]


class Relay:
    """At `url`, before the engine at `engine_url`, in a thread of its own.

    `asked` are the generations asked for, as (path, body); `open` is how many are being answered, `most_open` the most
    there were at once. `force` may change the body of a generation. While `held`, generations wait here.
    """

    def __init__(self, engine_url: str, force: Force | None = None) -> None:
        self.engine_url, self.force = engine_url, force
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.open = self.most_open = 0
        self.lose_prompt_ids = False
        self._go = threading.Event()
        self._go.set()
        self._client = httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None), trust_env=False)
        app = Starlette(routes=[Route("/{path:path}", self._relay, methods=["GET", "POST"])])
        self._server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical"))
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self.url = ""

    def __enter__(self) -> Self:
        self._thread.start()
        while not self._server.started:
            self._thread.join(timeout=0.01)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        self._go.set()
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(timeout=10)

    def hold(self) -> None:
        """Let generations wait until `release`."""
        self._go.clear()

    def release(self) -> None:
        """Let them go."""
        self._go.set()

    async def _relay(self, request: Request) -> Response:
        body = await request.body()
        if request.method != "POST" or request.url.path not in GENERATIONS:
            return await self._plain(request, body)
        asked = json.loads(body)
        self.asked.append((request.url.path, asked))
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            while not self._go.is_set() and not await request.is_disconnected():
                await asyncio.sleep(0.02)
            body = json.dumps(self.force(request.url.path, asked) if self.force else asked).encode()
            gone = asyncio.create_task(_gone(request))
            sending = asyncio.create_task(self._send(request, body))
            done, _ = await asyncio.wait({gone, sending}, return_when=asyncio.FIRST_COMPLETED)
            if sending not in done:
                sending.cancel()
                return self._ended(Response(status_code=499))
            gone.cancel()
            answer = await sending
        except BaseException:
            self.open -= 1
            raise
        if "event-stream" not in answer.headers.get("content-type", ""):
            return self._ended(await self._whole(request, answer))
        return StreamingResponse(self._pieces(answer), answer.status_code, media_type="text/event-stream")

    async def _plain(self, request: Request, body: bytes) -> Response:
        return await self._whole(request, await self._send(request, body))

    async def _send(self, request: Request, body: bytes) -> httpx.Response:
        url = f"{self.engine_url}{request.url.path}"
        url += f"?{request.url.query}" if request.url.query else ""
        kept = {key: value for key, value in request.headers.items() if key in ("content-type", "anthropic-version")}
        built = self._client.build_request(request.method, url, content=body or None, headers=kept)
        return await self._client.send(built, stream=True)

    async def _whole(self, request: Request, answer: httpx.Response) -> Response:
        data = await answer.aread()
        if self.lose_prompt_ids and answer.is_success:
            data = _without_prompt_ids(request.url.path, data)
        return Response(data, answer.status_code, media_type=answer.headers.get("content-type"))

    async def _pieces(self, answer: httpx.Response) -> AsyncIterator[bytes]:
        try:
            async for piece in answer.aiter_raw():
                yield piece
        finally:
            self.open -= 1
            await answer.aclose()

    def _ended(self, response: Response) -> Response:
        self.open -= 1
        return response


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue


def _without_prompt_ids(path: str, data: bytes) -> bytes:
    """What an engine's answer looks like that has no ids of its prompt."""
    if path == "/v1/chat/completions":
        return json.dumps({**json.loads(data), "prompt_token_ids": None}).encode()
    if path == "/v1/chat/completions/render":
        return json.dumps({**json.loads(data), "token_ids": None}).encode()
    return data
