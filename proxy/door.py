"""What every request passes before any route: its Host, its size, and how many turns are under way at once.

Plain ASGI, so that it costs a turn microseconds. It must never read a body ahead, and never add a CORS header:
browsers of other sites have no business here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from turngate.proxy import hosts
from turngate.proxy.agent_routes import dialect_at
from turngate.proxy.dialects.base import Dialect
from turngate.proxy.errors import GatewayRefusal, Misdirected, TooLarge, TooMany
from turngate.proxy.keys import blank_keys

AGENT_PATHS = ("/s/", "/v1/", "/v1beta/")


class Door:
    """ASGI middleware; `refused` is told the code of each refusal."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        allowed_hosts: Collection[str],
        max_body_bytes: int,
        max_concurrency: int,
        refused: Callable[[str], None],
    ) -> None:
        self._app, self._refused = app, refused
        self._in_flight = 0
        self._allowed = frozenset(allowed_hosts)
        self._max_body_bytes = max_body_bytes
        self._max_concurrency = max_concurrency

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse, or pass on with a body that cannot exceed its limit."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        agent = scope["path"].startswith(AGENT_PATHS)
        refusal = self._refusal(scope, agent)
        if refusal is not None:
            self._refused(refusal.code)
            await _send(send, refusal, dialect_at(scope["path"]))
            return
        self._in_flight += agent
        try:
            await self._app(scope, self._limited(receive), send)
        finally:
            self._in_flight -= agent

    def _refusal(self, scope: Scope, agent: bool) -> GatewayRefusal | None:
        host = length = b""
        for name, value in scope["headers"]:
            if name == b"host":
                host = value
            elif name == b"content-length":
                length = value
        if not hosts.is_allowed(host.decode("latin-1"), self._allowed):
            told = blank_keys(host.decode("latin-1"))
            return Misdirected(
                f"this gateway does not answer to the host {told!r}: use its address, or allow it with --allow-host"
            )
        if length.isdigit() and int(length) > self._max_body_bytes:
            return too_large(self._max_body_bytes)
        if agent and self._in_flight >= self._max_concurrency:
            return TooMany(f"{self._in_flight} requests are under way, the limit is max_concurrency; retry later")
        return None

    def _limited(self, receive: Receive) -> Receive:
        taken = 0

        async def limited() -> Message:
            nonlocal taken
            message = await receive()
            if message["type"] == "http.request":
                taken += len(message.get("body", b""))
                if taken > self._max_body_bytes:
                    raise too_large(self._max_body_bytes)
            return message

        return limited


def too_large(limit_bytes: int) -> TooLarge:
    """The refusal of a body that exceeds the limit."""
    return TooLarge(f"the body exceeds {limit_bytes} bytes; raise --max-body-bytes if this is meant to be")


async def _send(send: Send, refusal: GatewayRefusal, dialect: Dialect | None) -> None:
    """Answer without having read the body, and close: what is left of it has no reader."""
    data = orjson.dumps(refusal.body() if dialect is None else dialect.refusal(refusal))
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": data})
