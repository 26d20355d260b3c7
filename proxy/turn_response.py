"""The HTTP answer to a turn: whole or streamed, with keep-alives, and cancelled when the client goes away.

A response class of its own because the exchange is watched while it runs: the client's disconnect must reach the
engine at once, and a silent stream is kept open by comments. The exchange runs in the request's own task: each task
more would cost every turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
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
        self._started = self._over = self._gone = False
        self._timer: asyncio.TimerHandle | None = None
        self._sign: asyncio.Task[None] | None = None
        self._sent_at_s = time.monotonic()
        name = f"req_{exchange.id}".encode()
        self._names = [(b"request-id", name), (b"x-request-id", name)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application of this response."""
        bind_turn(self._session.id, self._exchange.id)
        self._gateway.drain.enter()
        serving = asyncio.current_task()
        assert serving is not None
        watch = asyncio.create_task(self._cancel_when_gone(receive, serving))
        try:
            await self._work(send)
        except asyncio.CancelledError:
            if not self._gone:
                raise
            serving.uncancel()
        except Exception as error:  # noqa: BLE001 - nobody is left to be told
            log.debug("client_gone", extra={"error": repr(error)})
        finally:
            self._over = True
            watch.cancel()
            self._gateway.drain.leave()
            self._gateway.sessions.leave(self._session)
            await self._exchange.close()

    async def _cancel_when_gone(self, receive: Receive, serving: asyncio.Task[Any]) -> None:
        """End the turn when its client leaves, unless all of its answer has been handed to the connection."""
        while (await receive())["type"] != "http.disconnect":
            pass
        if not self._over:
            self._gone = True
            self._gateway.metrics.cancelled()
            serving.cancel()

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
        with self._kept_alive(send):
            await self._exchange.open()
            events.start(self._exchange.prompt_tokens)
            async with aclosing(self._exchange.deltas()) as deltas:
                async for delta in deltas:
                    if data := events.delta(delta):
                        await self._send(send, data)
            await self._send(send, events.end(self._exchange.answer), more=False)

    @contextlib.contextmanager
    def _kept_alive(self, send: Send) -> Iterator[None]:
        """A sign of life whenever nothing was sent for a while: a timer, because most turns never need one."""
        self._await_silence(send)
        try:
            yield
        finally:
            for one in (self._timer, self._sign):
                if one is not None:
                    one.cancel()

    def _await_silence(self, send: Send) -> None:
        pause_s = self._gateway.settings.keepalive_s
        left_s = self._sent_at_s + pause_s - time.monotonic()
        if left_s <= 0:
            left_s = pause_s
            if self._sign is None or self._sign.done():
                self._sign = asyncio.create_task(self._send(send, self._events.keepalive()))
        self._timer = asyncio.get_running_loop().call_later(left_s + 0.01, self._await_silence, send)

    async def _send(self, send: Send, data: bytes, *, more: bool = True) -> None:
        self._sent_at_s = time.monotonic()
        self._over = self._over or not more
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
        self._over = True
        headers = [(b"content-type", JSON), (b"content-length", str(len(data)).encode()), *self._names]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": data})
