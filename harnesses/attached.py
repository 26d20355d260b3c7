"""What a container prints, read as it comes: Docker's framed stream of stdout and stderr, cut to a limit.

One socket a container and no thread, so many containers can be waited for at once. Frames are an 8-byte header (kind,
three zeros, length as big-endian u32) and a payload; see Docker's API reference, "Attach to a container".
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from docker import DockerClient

STDERR = 2


class Attached:
    """Attached to container `name`; enter before it is started, so that nothing is lost."""

    def __init__(self, client: DockerClient, name: str, limit_bytes: int) -> None:
        self._client = client
        self._name = name
        self._limit = limit_bytes
        self._kept = {1: bytearray(), STDERR: bytearray()}
        self._writer: asyncio.StreamWriter | None = None

    async def __aenter__(self) -> Self:
        mine = await asyncio.to_thread(self._open)
        self._reader, self._writer = await asyncio.open_connection(sock=mine)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()

    @property
    def stdout(self) -> str:
        """What it printed so far, up to the limit."""
        return self._kept[1].decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        """The same of standard error."""
        return self._kept[STDERR].decode("utf-8", "replace")

    async def read_to_end(self) -> None:
        """Read until the container's output ends; what is beyond the limit is dropped."""
        try:
            while True:
                kind, length = struct.unpack(">BxxxL", await self._reader.readexactly(8))
                kept = self._kept[STDERR if kind == STDERR else 1]
                while length:
                    data = await self._reader.read(min(length, 1 << 16))
                    if not data:
                        return
                    length -= len(data)
                    kept += data[: max(0, self._limit - len(kept))]
        except (asyncio.IncompleteReadError, ConnectionError):
            return

    def _open(self) -> socket.socket:
        """A socket of our own on the attached connection; the SDK's is closed with its response."""
        found = self._client.api.attach_socket(self._name, params={"stdout": 1, "stderr": 1, "stream": 1})
        mine = socket.socket(fileno=os.dup(found.fileno()))
        getattr(found, "_response", found).close()
        mine.setblocking(False)
        return mine
