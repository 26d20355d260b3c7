"""The HTTP answer to a turn: whole or streamed, with keep-alives, and left alone when its client goes away.

A response class of its own because client and turn end apart: the request's own task waits for the client's
disconnect, a second one makes the answer, or follows one being made for an equal request (`reattach`). A client that
left must never end a turn that another one listens to.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from turngate.proxy.ask import Answer, Ask
from turngate.proxy.dialects.base import Dialect, Events
from turngate.proxy.errors import EngineTrouble, GatewayRefusal
from turngate.proxy.exchange import Exchange
from turngate.proxy.gateway import Gateway
from turngate.proxy.logs import bind_turn
from turngate.proxy.reattach import Telling
from turngate.proxy.sessions import Session
from turngate.proxy.slow_clients import DELIVERY

log = logging.getLogger("turngate.turns")

JSON = b"application/json"
BLANK = b"\n"
"""A sign of life before a whole answer: JSON may begin with white space, and every client's parser skips it."""

LOOK_AGAIN_S = 0.05
"""How often a reader that has not taken all of its answer yet is looked at."""


class _CannotSay(Exception):
    """A whole answer failed after its blanks: its status has gone out already."""


Tell = Callable[[Mapping[str, Any]], Awaitable[None]]


class TurnResponse(Response):
    """Sends one client the answer that `exchange` makes, or without one an answer in the making (`telling`)."""

    def __init__(
        self,
        gateway: Gateway,
        session: Session,
        dialect: Dialect,
        ask: Ask,
        telling: Telling,
        exchange: Exchange | None = None,
    ) -> None:
        super().__init__()
        self._gateway = gateway
        self._session = session
        self._dialect = dialect
        self._ask = ask
        self._telling = telling
        self._exchange = exchange
        self._model = ask.model or session.policy
        self._events: Events = dialect.events(telling.turn_id, self._model, telling.created_s, ask)
        self._started = self._over = self._gone = self._broken = False
        self._timer: asyncio.TimerHandle | None = None
        self._sign: asyncio.Task[None] | None = None
        self._sent_at_s = time.monotonic()
        name = f"req_{telling.turn_id}".encode()
        self._names = [(b"request-id", name), (b"x-request-id", name)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application of this response; ends when the client has its answer or is gone."""
        bind_turn(self._session.id, self._telling.turn_id)
        self._gateway.drain.enter()
        serving = asyncio.current_task()
        assert serving is not None
        work = asyncio.create_task(self._work(send, serving))
        if self._exchange is not None:
            self._telling.work = work
        delivered = False
        try:
            while (await receive())["type"] != "http.disconnect":
                pass
            delivered = self._over and await self._is_delivered(scope)
        except asyncio.CancelledError:
            if not self._broken:  # the server ends
                work.cancel()
                raise
            serving.uncancel()  # without an end of the answer, the server closes the connection
        finally:
            self._gone = True
            if self._exchange is None:
                work.cancel()
            self._gateway.tellings.left(self._telling, delivered=delivered)
            self._gateway.sessions.leave(self._session)
            self._gateway.drain.leave()

    async def _is_delivered(self, scope: Scope) -> bool:
        """Whether all of the answer left this process, once that is known."""
        if DELIVERY not in scope:  # another server than ours tells nothing
            return True
        while (sent := scope[DELIVERY].is_sent()) is None:
            await asyncio.sleep(LOOK_AGAIN_S)
        return bool(sent)

    async def _work(self, send: Send, serving: asyncio.Task[Any]) -> None:
        if self._exchange is not None:
            self._exchange.telling = self._telling
        try:
            await self._answer(send)
        except _CannotSay:
            self._broken = True
            serving.cancel()
        except Exception:  # nobody can be told
            log.exception("answer_failed")
            self._broken = True
            serving.cancel()
        finally:
            if self._exchange is not None:
                self._telling.ended()
                await self._exchange.close()

    async def _answer(self, send: Send) -> None:
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

    async def _run(self, start: Callable[[int | None], None], tell: Tell | None) -> Answer:
        """Make the answer, or follow it: `start` gets the size of the prompt, `tell` each piece."""
        exchange, telling = self._exchange, self._telling
        if exchange is None:
            await telling.until_open()
            start(telling.prompt_tokens)
            async for delta in telling.listen():
                if tell is not None:
                    await tell(delta)
            assert telling.answer is not None
            return telling.answer
        await exchange.open()
        telling.opened(exchange.prompt_tokens)
        start(exchange.prompt_tokens)
        async with aclosing(exchange.deltas()) as deltas:
            async for delta in deltas:
                telling.add(delta)
                if tell is not None and not self._gone:
                    await tell(delta)
        telling.finished(exchange.answer)
        return exchange.answer

    async def _whole(self, send: Send) -> None:
        with self._kept_alive(send):
            answer = await self._run(lambda prompt_tokens: None, None)
        telling = self._telling
        body = self._dialect.completion(telling.turn_id, self._model, telling.created_s, self._ask, answer)
        await self._send_json(send, 200, body)

    async def _stream(self, send: Send) -> None:
        events = self._events

        async def tell(delta: Mapping[str, Any]) -> None:
            if data := events.delta(delta):
                await self._send(send, data)

        with self._kept_alive(send):
            answer = await self._run(events.start, tell)
            if not self._gone:
                await self._send(send, events.end(answer), more=False)

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
        if self._gone:
            return
        pause_s = self._gateway.settings.keepalive_s
        left_s = self._sent_at_s + pause_s - time.monotonic()
        if left_s <= 0:
            left_s = pause_s
            if self._sign is None or self._sign.done():
                sign = self._events.keepalive() if self._ask.stream else BLANK
                self._sign = asyncio.create_task(self._send(send, sign))
        self._timer = asyncio.get_running_loop().call_later(left_s + 0.01, self._await_silence, send)

    async def _send(self, send: Send, data: bytes, *, more: bool = True) -> None:
        if self._gone:
            return
        self._sent_at_s = time.monotonic()
        if not self._started:
            self._started = True
            kind = self._ask.stream_type if self._ask.stream else JSON
            headers = [(b"content-type", kind), (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]
            headers += self._names
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": data, "more_body": more})
        self._over = not more

    async def _refuse(self, send: Send, refusal: GatewayRefusal) -> None:
        if self._exchange is not None:
            self._telling.failed(refusal)
        self._gateway.turn_refused(self._session.id, self._telling.turn_id, refusal)
        if self._started and not self._ask.stream:
            raise _CannotSay from refusal
        if self._started:
            await self._send(send, self._events.error(refusal), more=False)
        else:
            await self._send_json(send, refusal.status, self._dialect.refusal(refusal))

    async def _send_json(self, send: Send, status: int, body: Any) -> None:
        if self._gone:
            return
        data = orjson.dumps(body)
        if self._started:
            await self._send(send, data, more=False)
            return
        headers = [(b"content-type", JSON), (b"content-length", str(len(data)).encode()), *self._names]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": data})
        self._over = True
