"""A connection that breaks: a TCP relay before a gateway which cuts the next answers midway, and keeps the requests.

Bytes only: what is cut is told by the path in a request's first line. In a thread of its own.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import suppress
from typing import Self


class Cutter:
    """Relays `url` to `127.0.0.1:to_port`; set that before the first request.

    The next `cuts` answers to a POST whose path ends with `path` end after their first bytes. `requests` are the whole
    requests for it as they came, heads and bodies.
    """

    def __init__(self, path: str, cuts: int) -> None:
        self.to_port = 0
        self.cuts = cuts
        self.requests: list[bytes] = []
        self._path = path.encode()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(asyncio.start_server(self._serve, sock=self._socket), self._loop).result()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._socket.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward_reader, onward = await asyncio.open_connection("127.0.0.1", self.to_port)
        wanted = asyncio.Event()
        pumps = {
            asyncio.create_task(self._ask(reader, onward, wanted)),
            asyncio.create_task(self._answer(onward_reader, writer, wanted)),
        }
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for one in pumps:
            one.cancel()
        writer.transport.abort()
        onward.close()

    async def _ask(self, reader: asyncio.StreamReader, onward: asyncio.StreamWriter, wanted: asyncio.Event) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                first = data.partition(b"\r\n")[0]
                if first.startswith(b"POST ") and first.split(b" ")[1].partition(b"?")[0].endswith(self._path):
                    self.requests.append(b"")
                    wanted.set()
                elif first.endswith(b"HTTP/1.1"):
                    wanted.clear()
                if wanted.is_set():
                    self.requests[-1] += data
                onward.write(data)

    async def _answer(self, onward: asyncio.StreamReader, writer: asyncio.StreamWriter, wanted: asyncio.Event) -> None:
        with suppress(OSError):
            while data := await onward.read(1 << 16):
                writer.write(data)
                await writer.drain()
                if wanted.is_set() and self.cuts:
                    self.cuts -= 1
                    return
