"""The HTTP protocol with limits that uvicorn has not: how long a request may take to arrive, how large its head may
be, how long a reader may take nothing, how many connections there may be.

Timers and counters on the connection only, so that a turn pays nothing for them. It must never cut off a client that
waits for its answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from turngate.proxy.errors import BadRequest, GatewayRefusal, HeadTooLarge, TooLarge, TooSlow
from turngate.proxy.settings import GatewaySettings


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """`request_timeout_s`: from the first byte of a request to its last. `write_timeout_s`: a full buffer unread."""

    request_timeout_s: float
    write_timeout_s: float
    max_header_bytes: int
    max_message_bytes: int
    max_connections: int

    @classmethod
    def of(cls, settings: GatewaySettings) -> ConnectionLimits:
        """Those of a gateway; a message may be twice its body, for chunked encoding."""
        return cls(
            settings.request_timeout_s,
            settings.write_timeout_s,
            settings.max_header_bytes,
            2 * settings.max_body_bytes + settings.max_header_bytes,
            settings.max_connections,
        )


DELIVERY = "turngate.delivery"
"""Key of an ASGI scope: the `Delivery` of its answer."""


class Delivery:
    """How far the answer to one request has come on its way out of this process."""

    __slots__ = ("_connection", "_cycle")

    def __init__(self, connection: GuardedProtocol, cycle: RequestResponseCycle) -> None:
        self._connection = connection
        self._cycle = cycle

    def is_sent(self) -> bool | None:
        """Whether its last byte was handed to the system; None while that waits for the reader."""
        if self._connection.broken or not self._cycle.response_complete:
            return False
        return True if not self._connection.transport.get_write_buffer_size() else None


def guarded(limits: ConnectionLimits, refused: Callable[[str], None]) -> type[HttpToolsProtocol]:
    """A protocol class for `uvicorn.Config(http=…)`; `refused` is told the code of whatever is cut off."""
    return type("Guarded", (GuardedProtocol,), {"limits": limits, "refused": staticmethod(refused)})


class GuardedProtocol(HttpToolsProtocol):
    """One connection; `limits` and `refused` are set by `guarded`."""

    limits: ConnectionLimits
    refused: Callable[[str], None]
    broken = False
    _in_head = True
    _head_bytes = 0
    _message_bytes = 0
    _arriving: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A new connection has to send a whole request in time, or goes."""
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            self.refused("too_many_connections")
            transport.abort()
            return
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """No timer outlives its connection."""
        self.broken = self.broken or exc is not None
        self._request_arrived()
        self._taken()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse, then count what has no end yet."""
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._arriving is None:
            if self._idle and self.timeout_keep_alive_task is None:
                self._await_request()  # bytes that begin no request
            return
        self._message_bytes += len(data)
        if self._in_head:
            self._head_bytes += len(data)
        if self._head_bytes > self.limits.max_header_bytes:
            self._cut(self._head_too_large())
        elif self._message_bytes > self.limits.max_message_bytes:
            self._cut(TooLarge("the request's body exceeds what its encoding may add to max_body_bytes"))

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._in_head, self._head_bytes, self._message_bytes = True, 0, 0
        self._await_request()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Trailers, which come after the body, are not headers."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is here; one that came at once is measured only now."""
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > self.limits.max_header_bytes:
            self._cut(self._head_too_large())
            return
        super().on_headers_complete()
        self._in_head = False
        if self.cycle is not None:
            self.scope[DELIVERY] = Delivery(self, self.cycle)  # type: ignore[literal-required]

    def on_body(self, body: bytes) -> None:
        """A piece of the body, unless its head was refused."""
        if not self._in_head:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is here; its answer may take as long as it takes."""
        self._request_arrived()
        if self._in_head:
            return
        super().on_message_complete()

    def pause_writing(self) -> None:
        """The reader is behind: whoever sends waits now, and the reader has a while to go on."""
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(self.limits.write_timeout_s, self._give_up)

    def resume_writing(self) -> None:
        """The reader went on."""
        self._taken()
        super().resume_writing()

    def _give_up(self) -> None:
        self.refused("slow_reader")
        self.broken = True
        self.transport.abort()

    def _await_request(self) -> None:
        if self._arriving is None:
            self._arriving = self.loop.call_later(self.limits.request_timeout_s, self._late)

    def _request_arrived(self) -> None:
        if self._arriving is not None:
            self._arriving.cancel()
            self._arriving = None

    def _taken(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _late(self) -> None:
        self._arriving = None
        if self.pipeline or (self._in_head and not self._idle):
            self._await_request()  # behind an answer that is being made; this one's time has not come
            return
        if self._in_head and not self._head_bytes:
            self.transport.close()  # nobody asked anything
            return
        self._cut(TooSlow(f"the request was not complete within {self.limits.request_timeout_s:g} s"))

    def _head_too_large(self) -> GatewayRefusal:
        return HeadTooLarge(f"the request's head exceeds {self.limits.max_header_bytes} bytes")

    @property
    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP gets the same shape of error as what is."""
        self._cut(BadRequest("this is not a sound HTTP/1.1 request", code="not_http"))

    def _cut(self, refusal: GatewayRefusal) -> None:
        """Say why where that cannot be taken for another request's answer; then close."""
        self.refused(refusal.code)
        answerable = self._idle if self._in_head else not (self.cycle.response_started or self.pipeline)
        if answerable:
            data = orjson.dumps(refusal.body())
            head = f"HTTP/1.1 {refusal.status} {HTTPStatus(refusal.status).phrase}\r\n"
            head += "content-type: application/json\r\n"
            head += f"content-length: {len(data)}\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode() + data)
        self.transport.close()
