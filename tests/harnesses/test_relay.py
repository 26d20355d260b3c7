"""The relay between a sandbox's door and the gateway: bytes both ways, at once, and hang-ups passed on."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable

from turngate.harnesses.relay import Relay

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def serving(handler: Handler) -> tuple[asyncio.Server, tuple[str, int]]:
    """A server on the host that stands for the gateway."""
    server = await asyncio.start_server(handler, "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[:2]


def door() -> tuple[socket.socket, int]:
    """A listening socket as a sandbox hands it over."""
    made = socket.create_server(("127.0.0.1", 0))
    made.setblocking(False)
    return made, made.getsockname()[1]


async def test_large_bodies_pass_unchanged_both_ways() -> None:
    body = bytes(range(256)) * 20_000

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(len(body)))
        await writer.drain()
        writer.close()

    server, address = await serving(echo)
    listener, port = door()
    async with server, Relay(listener, address):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(body)
        assert await reader.read(-1) == body
        writer.close()


async def test_the_first_bytes_pass_before_the_answer_is_complete() -> None:
    more = asyncio.Event()

    async def slow(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"first")
        await more.wait()
        writer.write(b"last")
        writer.close()

    server, address = await serving(slow)
    listener, port = door()
    async with server, Relay(listener, address):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await reader.readexactly(5) == b"first"
        more.set()
        assert await reader.read(-1) == b"last"
        writer.close()


async def test_a_client_that_hangs_up_takes_its_gateway_connection_with_it() -> None:
    ended: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def waiting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(5)
        ended.set_result(await reader.read(-1))
        writer.close()

    server, address = await serving(waiting)
    listener, port = door()
    async with server, Relay(listener, address):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"hello")
        await writer.drain()
        writer.close()
        assert await asyncio.wait_for(ended, 30) == b""


async def test_closing_the_relay_closes_what_is_open() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(-1)
        writer.close()

    server, address = await serving(silent)
    listener, port = door()
    async with server:
        async with Relay(listener, address):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"x")
            await writer.drain()
        assert await asyncio.wait_for(reader.read(-1), 30) == b""
        writer.close()


async def test_a_gateway_that_is_down_is_a_closed_connection() -> None:
    closed = socket.create_server(("127.0.0.1", 0))
    address = closed.getsockname()
    closed.close()
    listener, port = door()
    async with Relay(listener, address):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(-1), 30) == b""
        writer.close()
