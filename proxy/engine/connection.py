"""One HTTP/1.1 connection to an engine: one request at a time, written in one piece, parsed by httptools.

Own code because a client library's CPU a request was most of what a turn cost (docs/decisions.md has the figures). It
knows bytes, never JSON; it never retries, and whatever is left half read is closed, which aborts it in the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import httptools

_FRAMING = (b"content-length", b"transfer-encoding")
_FRAMING_LENGTHS = tuple(map(len, _FRAMING))

MAX_HEAD_BYTES = 64 << 10
"""More than any engine sends before a body; a peer that never ends its head is no HTTP server."""


class TransportError(Exception):
    """The connection failed.

    `closed`: the engine ended it; `unseen`: before a byte of the answer, so the request may never have been read.
    """

    def __init__(self, words: str, *, closed: bool = False, unseen: bool = False) -> None:
        super().__init__(words)
        self.closed = closed
        self.unseen = unseen


class Connection(asyncio.Protocol):
    """Ask with `send`, then `head()` once, then `read()` or `pieces` by `piece()`; `reusable` says what is left of it.

    `deadline_s` is the loop time at which the silence of the engine is a failure; the pool checks it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.deadline_s: float | None = None
        self.idle_since_s = 0.0
        self.used = False
        self._loop = loop
        self._patience_s: float | None = None
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._whole = False
        self._error: TransportError | None = None
        self._reset()

    def _reset(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._status = 0
        self._head_bytes = 0
        self._body: list[bytes] = []
        self._framed = False
        self._complete = False
        self._keep_alive = False
        self._excess = False

    def send(self, parts: Sequence[bytes], silence_s: float | None) -> None:
        """Write a request, head included; `silence_s` without a byte from the engine is then a failure.

        Raises:
            TransportError: the connection is closed.
        """
        if self._error is not None or self._transport is None:
            raise self._error or TransportError("the connection is closed", closed=True, unseen=True)
        if self.used:
            self._reset()
        self.used = True
        self._patience_s = silence_s
        self._listen()
        self._transport.writelines(parts)

    async def head(self) -> int:
        """The status, once the head of the answer is there.

        Raises:
            TransportError: the connection broke before.
        """
        while not self._status:
            await self._more()
        return self._status

    async def read(self) -> bytes:
        """The whole body; raises like `head`."""
        self._whole = True
        try:
            while not self._complete:
                await self._more()
        finally:
            self._whole = False
        return self._take()

    async def piece(self) -> bytes:
        """The next bytes of the body, empty at its end; raises like `head`."""
        while not self._body and not self._complete:
            await self._more()
        return self._take()

    @property
    def reusable(self) -> bool:
        """Whether the answer was read to its end and the engine keeps the connection open."""
        return self._complete and self._keep_alive and not self._excess and self._error is None

    def close(self) -> None:
        """Close at once; an answer still on its way is thus aborted."""
        self.deadline_s = None
        if self._error is None:
            self._error = TransportError("the connection was closed")
        if self._transport is not None:
            self._transport.abort()

    def fail(self, words: str, *, closed: bool = False) -> None:
        """Close, and let whoever waits know why."""
        if self._error is None:
            self._error = TransportError(words, closed=closed, unseen=closed and self._head_bytes == 0)
        self._wake()
        self.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        if self._complete or not self.used:
            self.fail("the engine sent something that was not asked for")
            return
        if not self._status:
            self._head_bytes += len(data)
        self._listen()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.fail(f"the engine sent something that is not HTTP/1.1: {error}")
            return
        if self._head_bytes > MAX_HEAD_BYTES and not self._status:
            self.fail(f"the engine's answer began with more than {MAX_HEAD_BYTES} bytes of headers")
            return
        if self._complete or (self._status and not self._whole):
            self._wake()

    def eof_received(self) -> None:
        """Called by the loop: an answer without a length ends here."""
        if self._status and not self._framed and not self._complete:
            self._complete, self._keep_alive = True, False
            self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the loop."""
        if self._complete:
            self._error = self._error or TransportError("the connection is closed", closed=True, unseen=True)
        else:
            self.fail(f"the engine closed the connection{f' ({error})' if error else ''}", closed=True)

    def on_message_begin(self) -> None:
        """Called by the parser: a second answer to one request is no answer to the next."""
        self._excess = self._complete

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser."""
        if len(name) in _FRAMING_LENGTHS and name.lower() in _FRAMING:
            self._framed = True

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        status = self._parser.get_status_code()
        if status >= 200 and not self._excess:  # what is below only announces the answer
            self._status = status

    def on_body(self, body: bytes) -> None:
        """Called by the parser."""
        if not self._excess:
            self._body.append(body)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        if self._status:
            self._complete = True
            self._keep_alive = self._parser.should_keep_alive()
            self.deadline_s = None

    def _listen(self) -> None:
        self.deadline_s = None if self._patience_s is None else self._loop.time() + self._patience_s

    def _take(self) -> bytes:
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body = []
        return body

    async def _more(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
