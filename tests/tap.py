"""An independent witness between gateway and engine: keeps raw bodies, and rebuilds rows from those alone.

Shares no code with the gateway on purpose. It reads only what crossed the wire: the ids each generation was asked to
continue, and the ids and log-probs it gave back.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from typing import Any, Self

import httpx
import numpy as np
import uvicorn
from numpy.typing import NDArray
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

GENERATE = "/inference/v1/generate"
SeenRow = tuple[tuple[int, ...], tuple[float | None, ...]]


@dataclass
class Exchange:
    """One call: path, raw request body and raw response body, grown as it streams."""

    path: str
    request: bytes
    response: bytearray = field(default_factory=bytearray)


@dataclass(frozen=True)
class Generation:
    """What one generation was given and gave."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str


class Tap:
    """A relay to `engine_url`, at `url`, in a thread."""

    def __init__(self, engine_url: str) -> None:
        self.engine_url = engine_url
        self.exchanges: list[Exchange] = []
        self._client = httpx.AsyncClient(timeout=300)
        app = Starlette(routes=[Route("/{path:path}", self._relay, methods=["GET", "POST"])])
        self._server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical"))
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        while not self._server.started:
            pass
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=10)

    async def _relay(self, request: Request) -> Response:
        body = self.sent(request.url.path, await request.body())
        exchange = Exchange(request.url.path, body)
        self.exchanges.append(exchange)
        headers = {"content-type": request.headers.get("content-type", "application/json")}
        upstream = self._client.build_request(
            request.method, self.engine_url + request.url.path, content=body, headers=headers
        )
        answer = await self._client.send(upstream, stream=True)

        async def stream() -> Any:
            try:
                async for piece in answer.aiter_raw():
                    exchange.response.extend(piece)
                    yield piece
            finally:
                await answer.aclose()

        kept = {k: v for k, v in answer.headers.items() if k in ("content-type",)}
        return StreamingResponse(stream(), status_code=answer.status_code, headers=kept)

    def sent(self, path: str, body: bytes) -> bytes:
        """What the engine gets for a request; a subclass may change it."""
        return body

    def generations(self) -> list[Generation]:
        """Finished generations, in order of their requests."""
        found = []
        for exchange in self.exchanges:
            if exchange.path == GENERATE and (generation := _generation(exchange)) is not None:
                found.append(generation)
        return found


def _generation(exchange: Exchange) -> Generation | None:
    ids: list[int] = []
    logprobs: list[float] = []
    finish = ""
    for line in exchange.response.decode().splitlines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        for choice in json.loads(line[6:]).get("choices", ()):
            ids += choice.get("token_ids") or ()
            logprobs += [entry["logprob"] for entry in (choice.get("logprobs") or {}).get("content") or ()]
            finish = choice.get("finish_reason") or finish
    if not finish:
        return None
    return Generation(tuple(json.loads(exchange.request)["token_ids"]), tuple(ids), tuple(logprobs), finish)


def rows_from(generations: list[Generation]) -> set[SeenRow]:
    """Rows as `(ids, log-prob or None per id)`: root-to-leaf paths, each sampled token once, first leaf wins.

    Log-probs are rounded to float32, in which rows are handed out.
    """
    paths = [g.prompt + g.completion for g in generations]
    leaves = [i for i, path in enumerate(paths) if not any(_continues(g.prompt, path) for g in generations[i + 1 :])]
    done: set[int] = set()
    rows = set()
    for leaf in leaves:
        row: list[float | None] = [None] * len(paths[leaf])
        for i, generation in enumerate(generations[: leaf + 1]):
            if i not in done and (i == leaf or _continues(paths[leaf], paths[i])):
                row[len(generation.prompt) : len(paths[i])] = generation.logprobs
                done.add(i)
        rows.add((paths[leaf], tuple(None if logprob is None else float(np.float32(logprob)) for logprob in row)))
    return rows


def in_this_form(ids: NDArray[np.int32], mask: NDArray[np.bool_], logprobs: NDArray[np.float32]) -> SeenRow:
    """The arrays of a row that was handed out (int32[N], bool[N], float32[N]), as `rows_from` gives rows."""
    paired = zip(logprobs.tolist(), mask.tolist(), strict=True)
    return tuple(ids.tolist()), tuple(logprob if sampled else None for logprob, sampled in paired)


def _continues(ids: tuple[int, ...], head: tuple[int, ...]) -> bool:
    return len(ids) > len(head) and ids[: len(head)] == head
