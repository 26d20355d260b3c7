"""Connections to engines, kept open between requests: who may use which, when one is stale, who waits too long.

A request whose kept connection was closed before a byte of the answer is sent once more, on a new one: engines close
idle connections just as they are used again. It must never hand out a connection with an answer half read.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import urlsplit

from turngate.proxy.engine.connection import Connection, TransportError

_SWEEP_S = 1.0


@dataclass(frozen=True, slots=True)
class Target:
    """Where a URL leads: the address, and what a request line needs."""

    host: str
    port: int
    tls: bool
    path: str
    name: str


@lru_cache(maxsize=4096)
def target(url: str) -> Target:
    """A URL taken apart.

    Raises:
        ValueError: it is not http:// or https:// with a host.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or any(c <= " " for c in url):
        raise ValueError(f"{url!r} is not the URL of an HTTP server")
    tls = parts.scheme == "https"
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Target(parts.hostname, parts.port or (443 if tls else 80), tls, path, parts.netloc.rpartition("@")[2])


class Pool:
    """All connections of a gateway, of one event loop.

    Args:
        headers: sent with every request, each line with its CRLF.
        keepalive_s: how long an idle connection may be used again; below the servers' own limit.
        connect_timeout_s: how long to wait for a connection.
    """

    def __init__(self, headers: str, *, keepalive_s: float, connect_timeout_s: float, max_idle: int = 256) -> None:
        self._headers = headers
        self._keepalive_s = keepalive_s
        self._connect_timeout_s = connect_timeout_s
        self._max_idle = max_idle
        self._idle: dict[tuple[str, int, bool], list[Connection]] = {}
        self._busy: set[Connection] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._tls: ssl.SSLContext | None = None

    @contextlib.asynccontextmanager
    async def ask(
        self, method: str, url: str, parts: Sequence[bytes], silence_s: float | None
    ) -> AsyncGenerator[tuple[int, Connection], None]:
        """Send a request: its status, and the connection to read the body from.

        The connection is kept when the body was read to its end, else closed.

        Raises:
            TransportError: no connection, or it broke before the head of the answer came.
        """
        to = target(url)
        message = [self._head(method, to, sum(map(len, parts))), *parts]
        connection, status = await self._sent(to, message, silence_s)
        del message, parts  # a prompt's ids as JSON, for as long as its answer is sampled
        try:
            yield status, connection
        finally:
            self._give_back(to, connection)

    async def aclose(self) -> None:
        """Close every connection."""
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        for connection in [*self._busy, *(one for idle in self._idle.values() for one in idle)]:
            connection.fail("the gateway is shutting down")
        self._busy.clear()
        self._idle.clear()
        await asyncio.sleep(0)

    def _head(self, method: str, to: Target, length: int) -> bytes:
        size = f"content-length: {length}\r\n" if method != "GET" else ""
        return f"{method} {to.path} HTTP/1.1\r\nhost: {to.name}\r\n{self._headers}{size}\r\n".encode("latin-1")

    async def _sent(self, to: Target, message: Sequence[bytes], silence_s: float | None) -> tuple[Connection, int]:
        """Send on a kept connection, or on a new one where that turns out to be closed."""
        loop = asyncio.get_running_loop()
        kept = self._kept(to, loop.time())
        if kept is not None:
            try:
                return kept, await self._asked(kept, message, silence_s)
            except TransportError as error:
                if not error.unseen:
                    raise
        connection = await self._connect(to, loop)
        return connection, await self._asked(connection, message, silence_s)

    async def _asked(self, connection: Connection, message: Sequence[bytes], silence_s: float | None) -> int:
        """The status of the answer; a connection that fails, or whose caller leaves, is closed."""
        self._busy.add(connection)
        self._watch(asyncio.get_running_loop())
        try:
            connection.send(message, silence_s)
            return await connection.head()
        except BaseException:
            self._busy.discard(connection)
            connection.close()
            raise

    def _kept(self, to: Target, now_s: float) -> Connection | None:
        idle = self._idle.get((to.host, to.port, to.tls))
        while idle:
            connection = idle.pop()
            if connection.reusable and now_s - connection.idle_since_s < self._keepalive_s:
                return connection
            connection.close()
        return None

    async def _connect(self, to: Target, loop: asyncio.AbstractEventLoop) -> Connection:
        if to.tls and self._tls is None:
            self._tls = ssl.create_default_context()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(loop), to.host, to.port, ssl=self._tls if to.tls else None
                )
        except TimeoutError as error:
            raise TransportError(f"no connection within {self._connect_timeout_s:g} s") from error
        except OSError as error:
            raise TransportError(f"no connection: {error.strerror or error}") from error
        return connection

    def _give_back(self, to: Target, connection: Connection) -> None:
        self._busy.discard(connection)
        idle = self._idle.setdefault((to.host, to.port, to.tls), [])
        if connection.reusable and len(idle) < self._max_idle:
            connection.idle_since_s = asyncio.get_running_loop().time()
            idle.append(connection)
        else:
            connection.close()

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """One timer for all: it ends with the last connection."""
        if self._sweep is None:
            self._sweep = loop.call_later(_SWEEP_S, self._swept, loop)

    def _swept(self, loop: asyncio.AbstractEventLoop) -> None:
        self._sweep = None
        now_s = loop.time()
        for connection in list(self._busy):
            if connection.deadline_s is not None and now_s > connection.deadline_s:
                connection.fail("nothing came from the engine in time")
        for key, idle in list(self._idle.items()):
            stale = [one for one in idle if not one.reusable or now_s - one.idle_since_s >= self._keepalive_s]
            for connection in stale:
                idle.remove(connection)
                connection.close()
            if not idle:
                del self._idle[key]
        if self._busy or self._idle:
            self._watch(loop)
