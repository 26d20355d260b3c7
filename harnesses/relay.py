"""The only way out of a sandbox: bytes between its loopback door and the gateway's address, pumped by the runner.

The listening socket was made inside the sandbox and handed over; accepting on it here needs no process inside. Bytes
are never looked at, and a client that hangs up takes its gateway connection with it, so generation is cancelled.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Self

CHUNK_BYTES = 1 << 16
CONNECT_TIMEOUT_S = 10.0


class Relay:
    """Forwards every connection accepted on `door` to `address`; closing it closes all of them."""

    def __init__(self, door: socket.socket, address: tuple[str, int]) -> None:
        self._door = door
        self._address = address
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.connections = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, sock=self._door)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until either side ends; both sides are closed then, whatever happened."""
        ends = [writer]
        pumps: set[asyncio.Task[None]] = set()
        try:
            out_reader, out_writer = await asyncio.wait_for(asyncio.open_connection(*self._address), CONNECT_TIMEOUT_S)
            ends.append(out_writer)
            pumps = {asyncio.create_task(_pump(reader, out_writer)), asyncio.create_task(_pump(out_reader, writer))}
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        except (OSError, TimeoutError):
            return
        finally:
            for pump in pumps:
                pump.cancel()
            for end in ends:
                end.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until one side ends."""
    try:
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
    except (ConnectionError, TimeoutError):
        return
