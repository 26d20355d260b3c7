"""The HTTP answer to a turn: whole or streamed, with keep-alives, and cancelled when the client goes away.

A response class of its own because three things must run side by side: the exchange, the watch for the client's
disconnect (which must reach the engine at once), and the comments that keep a silent stream open.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from contextlib import aclosing
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from turngate.proxy.ask import Ask
from turngate.proxy.dialects.base import Dialect, Events
from turngate.proxy.errors import EngineTrouble, GatewayRefusal
from turngate.proxy.exchange import Exchange
from turngate.proxy.gateway import Gateway
from turngate.proxy.logs import bind_turn
from turngate.proxy.sessions import Session

log = logging.getLogger("turngate.turns")

JSON = b"application/json"


class TurnResponse(Response):
    """Runs one exchange and sends its answer."""

    def __init__(self, gateway: Gateway, session: Session, dialect: Dialect, ask: Ask, exchange: Exchange) -> None:
        super().__init__()
        self._gateway = gateway
        self._session = session
        self._dialect = dialect
        self._ask = ask
        self._exchange = exchange
        self._model = ask.model or session.policy
        self._created_s = int(time.time())
        self._events: Events = dialect.events(exchange.id, self._model, self._created_s, ask)
        self._started = False
        self._sent_at_s = time.monotonic()
        name = f"req_{exchange.id}".encode()
        self._names = [(b"request-id", name), (b"x-request-id", name)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application of this response."""
        bind_turn(self._session.id, self._exchange.id)
        self._gateway.drain.enter()
        work = asyncio.create_task(self._work(send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self._gateway.metrics.cancelled()
        finally:
            self._gateway.drain.leave()
            self._gateway.sessions.leave(self._session)
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
            await self._exchange.close()
            if not work.cancelled() and (error := work.exception()):
                log.debug("client_gone", extra={"error": repr(error)})

    async def _work(self, send: Send) -> None:
        try:
            if self._ask.stream:
                await self._stream(send)
            else:
                await self._whole(send)
        except GatewayRefusal as refusal:
            await self._refuse(send, refusal)
        except Exception:  # the last fence: the agent gets words, the log the trace
            log.exception("turn_failed")
            await self._refuse(send, EngineTrouble("the gateway failed on this turn; its log has the cause"))

    async def _whole(self, send: Send) -> None:
        await self._exchange.open()
        async with aclosing(self._exchange.deltas()) as deltas:
            async for _ in deltas:
                pass
        answer = self._exchange.answer
        body = self._dialect.completion(self._exchange.id, self._model, self._created_s, self._ask, answer)
        await self._send_json(send, 200, body)

    async def _stream(self, send: Send) -> None:
        events = self._events
        async with self._kept_alive(send):
            await self._exchange.open()
            events.start(self._exchange.prompt_tokens)
            async with aclosing(self._exchange.deltas()) as deltas:
                async for delta in deltas:
                    if data := events.delta(delta):
                        await self._send(send, data)
            await self._send(send, events.end(self._exchange.answer), more=False)

    @contextlib.asynccontextmanager
    async def _kept_alive(self, send: Send) -> Any:
        async def tick() -> None:
            pause_s = self._gateway.settings.keepalive_s
            while True:
                await asyncio.sleep(pause_s - min(pause_s, time.monotonic() - self._sent_at_s) + 0.01)
                if time.monotonic() - self._sent_at_s >= pause_s:
                    await self._send(send, self._events.keepalive())

        ticker = asyncio.create_task(tick())
        try:
            yield
        finally:
            ticker.cancel()

    async def _send(self, send: Send, data: bytes, *, more: bool = True) -> None:
        self._sent_at_s = time.monotonic()
        if not self._started:
            self._started = True
            kind = self._ask.stream_type
            headers = [(b"content-type", kind), (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]
            headers += self._names
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": data, "more_body": more})

    async def _refuse(self, send: Send, refusal: GatewayRefusal) -> None:
        self._gateway.turn_refused(self._session.id, self._exchange.id, refusal)
        if self._started:
            await self._send(send, self._events.error(refusal), more=False)
        else:
            await self._send_json(send, refusal.status, self._dialect.refusal(refusal))

    async def _send_json(self, send: Send, status: int, body: Any) -> None:
        data = orjson.dumps(body)
        headers = [(b"content-type", JSON), (b"content-length", str(len(data)).encode()), *self._names]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": data})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
