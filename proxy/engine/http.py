"""The one place that speaks HTTP to an engine: pooled connections, JSON by orjson, server-sent events.

It translates transport trouble and status codes into this package's errors; it knows no endpoint and keeps no state
but connections. It must never retry what could have started a generation.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import orjson

from turngate.proxy.engine.connection import Connection, TransportError
from turngate.proxy.engine.errors import ContextOverflow, EngineError, EngineFault, EngineRefused, EngineUnavailable
from turngate.proxy.engine.pool import Pool

# Below uvicorn's 5 s, so that the engine never closes an idle connection just as it is used again.
_KEEPALIVE_S = 2.0
_MAX_ERROR_CHARS = 2000
T = TypeVar("T")
_OVERFLOW = re.compile(r"maximum (model|context) length|longer than the maximum|exceeds max_model_len", re.IGNORECASE)


class EngineHttp:
    """A connection pool for all engines of a gateway. Close it with `aclose`."""

    def __init__(
        self,
        *,
        connect_timeout_s: float = 5.0,
        read_timeout_s: float = 600.0,
        api_key: str | None = None,
    ) -> None:
        headers = "content-type: application/json\r\naccept-encoding: identity\r\n"
        if api_key:
            headers += f"authorization: Bearer {api_key}\r\n"
        self._read_timeout_s = read_timeout_s
        self._pool = Pool(headers, keepalive_s=_KEEPALIVE_S, connect_timeout_s=connect_timeout_s)

    async def aclose(self) -> None:
        """Close all connections; generations still streaming are aborted by their engines."""
        await self._pool.aclose()

    async def get(self, url: str, *, timeout_s: float = 10.0) -> Any:
        """Parsed JSON of a GET.

        Raises:
            EngineRefused, EngineUnavailable
        """
        return loads(await self._request("GET", url, (), timeout_s) or b"null")

    async def get_text(self, url: str, *, timeout_s: float = 10.0) -> str:
        """Text of a GET; raises like `get`."""
        return (await self._request("GET", url, (), timeout_s)).decode("utf-8", "replace")

    async def post(self, url: str, body: Any, *, timeout_s: float | None = None, pure: bool = False) -> Any:
        """Answer of a POST: parsed JSON, or the text where it is not JSON. `pure` calls are tried twice.

        Raises:
            EngineRefused, ContextOverflow, EngineUnavailable
        """
        content = (dumps(body),)
        timeout_s = self._read_timeout_s if timeout_s is None else timeout_s
        try:
            answer = await self._request("POST", url, content, timeout_s)
        except EngineUnavailable as error:
            if not pure or not isinstance(error.__cause__, TransportError) or not error.__cause__.closed:
                raise
            answer = await self._request("POST", url, content, timeout_s)
        if not answer:
            return None
        try:
            return loads(answer)
        except ValueError:
            return answer.decode("utf-8", "replace")

    async def events(
        self, url: str, body: Any, quick: Callable[[bytes], T | None] = lambda data: None
    ) -> AsyncGenerator[dict[str, Any] | T, None]:
        """Objects of a server-sent event stream, up to `[DONE]`; the body is read to its end to keep the connection.

        `quick` may turn an event's bytes into what it likes; where it gives None they become a dictionary.

        Closing this generator closes the connection, which makes vLLM abort the generation.

        Raises:
            EngineRefused, ContextOverflow, EngineUnavailable: before the first event, also where vLLM has answered
                200 already and puts the refusal into the stream.
            EngineFault: the connection broke later, an `error` object came, or something that is not an event.
        """
        started = done = False
        try:
            async with self._pool.ask("POST", url, (dumps(body),), self._read_timeout_s) as (status, connection):
                if status >= 400:
                    raise _status_error(status, await connection.read(), url)
                async with aclosing(_data_lines(connection)) as lines:
                    async for data in lines:
                        done = done or data == b"[DONE]"
                        if done:
                            continue
                        known = quick(data)
                        if known is None:
                            event = _event(data, url)
                            if event.get("error") is not None:
                                raise _event_error(event, url, started)
                        started = True
                        yield event if known is None else known
        except TransportError as error:
            if done:
                return
            if started:
                raise EngineFault(f"the stream from {url} broke: {error}") from error
            raise EngineUnavailable(f"no answer from the engine at {url}: {error}") from error

    async def _request(self, method: str, url: str, content: Sequence[bytes], timeout_s: float) -> bytes:
        try:
            async with self._pool.ask(method, url, content, timeout_s) as (status, connection):
                answer = await connection.read()
        except TransportError as error:
            raise EngineUnavailable(f"no answer from the engine at {url}: {error}") from error
        if status >= 400:
            raise _status_error(status, answer, url)
        return answer


def dumps(value: Any) -> bytes:
    """JSON bytes; numpy arrays become lists."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def loads(data: bytes) -> Any:
    """Parsed JSON; `NaN` and `Infinity`, which are not JSON but occur, become floats. Raises ValueError."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return json.loads(data)


async def _data_lines(connection: Connection) -> AsyncGenerator[bytes, None]:
    """The payload of each `data:` line; comments and other fields are skipped."""
    rest = b""
    while piece := await connection.piece():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _event(data: bytes, url: str) -> dict[str, Any]:
    try:
        value = loads(data)
    except ValueError as error:
        raise EngineFault(f"the stream from {url} carried something that is not JSON: {data[:200]!r}") from error
    if not isinstance(value, dict):
        raise EngineFault(f"the stream from {url} carried {data[:200]!r}, not an object")
    return value


def _event_error(event: dict[str, Any], url: str, started: bool) -> EngineError:
    """The error that an `error` event stands for: vLLM refuses some requests only inside the stream."""
    message, code = _error_fields(event)
    error = event["error"]
    status = error.get("code") if isinstance(error, dict) else None
    if started or not isinstance(status, int):
        return EngineFault(f"the engine at {url} failed midway: {message}" + (f" ({code})" if code else ""))
    return _refusal(status, message, code, url)


def _status_error(status: int, content: bytes, url: str) -> EngineError:
    try:
        value = loads(content)
    except ValueError:
        value = None
    message, code = _error_fields(value)
    message = message or content[:_MAX_ERROR_CHARS].decode("utf-8", "replace") or f"HTTP {status}"
    return _refusal(status, message, code, url)


def _refusal(status: int, message: str, code: str | None, url: str) -> EngineError:
    if status >= 500 or status == 429:
        return EngineUnavailable(f"the engine at {url} answered HTTP {status}: {message}")
    kind = ContextOverflow if status == 400 and _OVERFLOW.search(message) else EngineRefused
    return kind(status, message, code)


def _error_fields(value: Any) -> tuple[str, str | None]:
    """Message and type of vLLM's `{"error": {...}}`, of its older flat form, or of FastAPI's `{"detail": ...}`."""
    if not isinstance(value, dict):
        return "", None
    error = value.get("error", value)
    if isinstance(error, dict):
        code = error.get("type") or error.get("code")
        return str(error.get("message") or error.get("detail") or "")[:_MAX_ERROR_CHARS], None if code is None else str(
            code
        )
    return str(error)[:_MAX_ERROR_CHARS], None
