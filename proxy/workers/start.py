"""What a worker is told at its start, as one value that goes through a private pipe."""

from __future__ import annotations

import pickle
import struct
from dataclasses import dataclass
from typing import BinaryIO

from turngate.proxy.engines import Found
from turngate.proxy.settings import GatewaySettings


@dataclass(frozen=True, slots=True)
class Start:
    """`listen_fd` is the worker's inherited listener, `found` what was probed, `key` opens its internal routes."""

    worker: int
    settings: GatewaySettings
    found: Found
    listen_fd: int
    key: str

    def packed(self) -> bytes:
        """As it goes through the pipe."""
        data = pickle.dumps(self)
        return struct.pack("<Q", len(data)) + data


def told(pipe: BinaryIO) -> Start:
    """The value at the other end of the pipe, whose writer is this process's own parent."""
    (size,) = struct.unpack("<Q", pipe.read(8))
    start: Start = pickle.loads(pipe.read(size))
    return start
