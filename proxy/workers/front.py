"""The main port of a gateway of several processes: agents' requests go on to the worker that their secret names.

Thin: a request body is held until it is whole, an answer passes as it comes, and a client that leaves takes the
worker's request with it. It never looks into either, and knows no session.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

import httpx
from fastapi import APIRouter, Request, Response
from starlette.types import Receive, Scope, Send

from turngate.proxy.agent_routes import read_body, secret_of
from turngate.proxy.control import Control
from turngate.proxy.drain import Drain
from turngate.proxy.errors import GatewayRefusal, NotFound, WorkerAway
from turngate.proxy.keys import worker_of

log = logging.getLogger("turngate.front")

HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade")
)
_OURS = frozenset((b"host", b"content-length", b"expect"))
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"]
_Headers = list[tuple[bytes, bytes]]

router = APIRouter(tags=["agents"], include_in_schema=False)


@router.api_route("/v1/{path:path}", methods=_METHODS)
@router.api_route("/v1beta/{path:path}", methods=_METHODS)
@router.api_route("/s/{secret}/{path:path}", methods=_METHODS)
async def relay(request: Request, secret: str | None = None) -> Response:
    """Hand a request to the worker that its secret names."""
    control: Control = request.app.state.control
    assert control.fleet is not None
    control.drain.check()
    number = worker_of(secret_of(request, secret))
    if number >= len(control.fleet.links):
        raise NotFound("no session has this key: use the base_url that POST /rollouts returned")
    body = await read_body(request, control.settings.max_body_bytes)
    path = request.scope["raw_path"].decode("ascii")
    query = request.scope["query_string"].decode("ascii")
    url = f"{control.fleet.links[number].url}{path}" + (f"?{query}" if query else "")
    headers = _passed(request.scope["headers"], _OURS)
    onward = control.fleet.http.build_request(request.method, url, headers=headers, content=body)
    return Relayed(control.fleet.http, onward, control.drain, number)


class Relayed(Response):
    """A worker's answer, as it comes."""

    def __init__(self, http: httpx.AsyncClient, onward: httpx.Request, drain: Drain, worker: int) -> None:
        super().__init__()
        self._http = http
        self._onward = onward
        self._drain = drain
        self._worker = worker
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application of this response."""
        work = asyncio.create_task(self._pass_on(send))
        gone = asyncio.create_task(_disconnected(receive))
        self._drain.enter()
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._drain.leave()
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
        if not work.cancelled() and (error := work.exception()) is not None:
            raise error

    async def _pass_on(self, send: Send) -> None:
        try:
            answer = await self._http.send(self._onward, stream=True)
            try:
                headers = _passed(answer.headers.raw, frozenset())
                await send({"type": "http.response.start", "status": answer.status_code, "headers": headers})
                self._started = True
                async for piece in answer.aiter_raw():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            finally:
                await answer.aclose()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except httpx.HTTPError as error:
            log.warning("relay_failed", extra={"to_worker": self._worker, "error": repr(error)})
            if not self._started:
                raise _away(self._worker) from error
            # Not completed: the server then breaks the connection, so that nobody takes the answer for whole.


def _away(worker: int) -> GatewayRefusal:
    return WorkerAway(f"worker {worker}, which has this session, went away; it is being started again: ask again")


def _passed(headers: Iterable[tuple[bytes, bytes]], but: frozenset[bytes]) -> _Headers:
    return [(name, value) for name, value in headers if name.lower() not in HOP_BY_HOP | but]


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
