"""The connections to engines, against a server that writes raw bytes: borders, breaks, silence, reuse."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from turngate.proxy.engine.connection import MAX_HEAD_BYTES, TransportError
from turngate.proxy.engine.pool import Pool, target

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter, int], Awaitable[None]]
WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"


class Server:
    """Reads requests with a content-length, lets `answer(reader, writer, request number)` write what it likes."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.requests: list[bytes] = []
        self.connections = 0
        self.ended = asyncio.Event()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                size = next((int(x[15:]) for x in head.split(b"\r\n") if x.startswith(b"content-length:")), 0)
                self.requests.append(head + await reader.readexactly(size))
                await self.answer(reader, writer, len(self.requests))
                await writer.drain()
        self.ended.set()
        writer.close()


@asynccontextmanager
async def served(answer: Answer, **options: float) -> AsyncIterator[tuple[Server, str, Pool]]:
    server = Server(answer)
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    pool = Pool("x-test: yes\r\n", keepalive_s=options.get("keepalive_s", 5.0), connect_timeout_s=5.0)
    try:
        yield server, f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", pool
    finally:
        await pool.aclose()
        listener.close()


def writes(*pieces: bytes, close: bool = False) -> Answer:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter, __: int) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        if close:
            writer.close()

    return answer


async def whole(pool: Pool, url: str, body: bytes = b"", silence_s: float | None = 30.0) -> tuple[int, bytes]:
    async with pool.ask("POST", url, (body,), silence_s) as (status, connection):
        return status, await connection.read()


async def test_a_request_is_sent_as_it_should_be() -> None:
    async with served(writes(WHOLE)) as (server, url, pool):
        assert await whole(pool, f"{url}/a/b?c=d", b'{"x": 1}') == (200, b"hello")
        host = url.removeprefix("http://")
        head = f"POST /a/b?c=d HTTP/1.1\r\nhost: {host}\r\nx-test: yes\r\ncontent-length: 8\r\n\r\n"
        assert server.requests == [head.encode() + b'{"x": 1}']


async def test_requests_after_another_share_a_connection_and_those_at_once_do_not() -> None:
    async with served(writes(WHOLE)) as (server, url, pool):
        for _ in range(3):
            await whole(pool, url)
        assert server.connections == 1
        await asyncio.gather(*(whole(pool, url) for _ in range(3)))
        assert server.connections == 3


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2;x=y\r\nlo\r\n0\r\ntrailer: 1\r\n\r\n"


@given(st.lists(st.integers(1, len(CHUNKED) - 1), max_size=12), st.sampled_from([WHOLE, CHUNKED]))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_where_bytes_are_cut_does_not_matter(cuts: list[int], answer: bytes) -> None:
    at = [0, *sorted(set(cuts)), len(answer)]
    pieces = [answer[a:b] for a, b in pairwise(at) if answer[a:b]]
    async with served(writes(*pieces)) as (server, url, pool):
        for _ in range(2):
            assert await whole(pool, url) == (200, b"hello")
        assert server.connections == 1


async def test_a_stream_is_read_while_it_is_written() -> None:
    go = asyncio.Event()

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter, __: int) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nfirst\r\n")
        await go.wait()
        writer.write(b"4\r\nlast\r\n0\r\n\r\n")

    async with served(answer) as (server, url, pool):
        async with pool.ask("POST", url, (), 30.0) as (_, connection):
            assert await connection.piece() == b"first"
            go.set()
            assert [await connection.piece(), await connection.piece()] == [b"last", b""]
        go.set()
        await whole(pool, url)
        assert server.connections == 1


async def test_leaving_a_stream_closes_its_connection_at_once() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nfirst\r\n")
        assert await reader.read(1) == b""
        writer.close()

    async with served(answer) as (server, url, pool):
        async with pool.ask("POST", url, (), 30.0) as (_, connection):
            await connection.piece()
        async with asyncio.timeout(10):
            await server.ended.wait()


async def test_a_cancelled_request_closes_its_connection() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        assert await reader.read(1) == b""
        writer.close()

    async with served(answer) as (server, url, pool):
        asking = asyncio.create_task(whole(pool, url))
        while not server.requests:
            await asyncio.sleep(0.005)
        asking.cancel()
        async with asyncio.timeout(10):
            await server.ended.wait()


@pytest.mark.parametrize("got", [b"", b"HTTP/1.1 200 OK\r\nconten", WHOLE[:-1], CHUNKED[:-2]])
async def test_half_an_answer_is_an_error_and_is_not_asked_for_again(got: bytes) -> None:
    async with served(writes(got, close=True)) as (server, url, pool):
        with pytest.raises(TransportError, match="closed the connection") as caught:
            await whole(pool, url)
        assert (caught.value.closed, caught.value.unseen) == (True, got == b"")
        assert len(server.requests) == 1


async def test_a_kept_connection_that_was_closed_meanwhile_is_replaced() -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        if number == 2:
            writer.close()  # the second request is read on the kept connection, and never answered
        else:
            writer.write(WHOLE)

    async with served(answer) as (server, url, pool):
        assert [await whole(pool, url), await whole(pool, url, b"again")] == [(200, b"hello")] * 2
        assert server.connections == 2
        assert server.requests[1] == server.requests[2]


async def test_a_kept_connection_that_broke_within_its_answer_is_not_replaced() -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        writer.write(WHOLE if number == 1 else WHOLE[:9])
        if number == 2:
            writer.close()

    async with served(answer) as (server, url, pool):
        await whole(pool, url)
        with pytest.raises(TransportError):
            await whole(pool, url)
        assert len(server.requests) == 2


async def test_an_engine_that_says_close_is_not_asked_on_that_connection_again() -> None:
    last = WHOLE.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    async with served(writes(last)) as (server, url, pool):
        for _ in range(2):
            await whole(pool, url)
        assert server.connections == 2


async def test_idle_connections_are_closed_in_time() -> None:
    async with served(writes(WHOLE), keepalive_s=0.05) as (server, url, pool):
        await whole(pool, url)
        async with asyncio.timeout(10):
            await server.ended.wait()
        await whole(pool, url)
        assert server.connections == 2


async def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    async with served(writes(b"HTTP/1.1 200 OK\r\n\r\nhel", b"lo", close=True)) as (_, url, pool):
        assert await whole(pool, url) == (200, b"hello")


async def test_an_interim_answer_is_passed_over() -> None:
    async with served(writes(b"HTTP/1.1 100 Continue\r\n\r\n", WHOLE)) as (_, url, pool):
        assert await whole(pool, url) == (200, b"hello")


async def test_silence_is_an_error_after_a_while() -> None:
    async with served(writes(WHOLE[:-1])) as (server, url, pool):
        with pytest.raises(TransportError, match="in time") as caught:
            await whole(pool, url, silence_s=0.05)
        assert not caught.value.closed
        assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("got", "words"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * (MAX_HEAD_BYTES // 6 + 10), "headers"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", "not HTTP"),
    ],
)
async def test_what_is_not_http_is_an_error(got: bytes, words: str) -> None:
    async with served(writes(got)) as (_, url, pool):
        with pytest.raises(TransportError, match=words):
            await whole(pool, url)


async def test_bytes_nobody_asked_for_make_a_connection_useless() -> None:
    async with served(writes(WHOLE + b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nbad")) as (server, url, pool):
        for _ in range(2):
            with suppress(TransportError):
                assert await whole(pool, url) == (200, b"hello")
        assert server.connections == 2


async def test_nobody_there_is_an_error() -> None:
    pool = Pool("", keepalive_s=1.0, connect_timeout_s=5.0)
    with pytest.raises(TransportError, match="no connection"):
        await whole(pool, "http://127.0.0.1:9/")
    await pool.aclose()


async def test_a_large_body_arrives_whole() -> None:
    body = b"0123456789" * 400_000
    async with served(writes(WHOLE)) as (server, url, pool):
        assert await whole(pool, url, body) == (200, b"hello")
        assert server.requests[0].endswith(body)


def test_urls_are_taken_apart() -> None:
    to = target("https://host.example/v1/x?y=z")
    assert (to.host, to.port, to.tls, to.path, to.name) == ("host.example", 443, True, "/v1/x?y=z", "host.example")
    assert (target("http://[::1]:8000").host, target("http://[::1]:8000").name) == ("::1", "[::1]:8000")
    for wrong in ("ftp://host", "http://", "http://host/a b", "http://host/a\r\nb: c"):
        with pytest.raises(ValueError, match="URL"):
            target(wrong)
