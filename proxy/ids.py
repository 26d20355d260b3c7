"""Identifiers: UUIDv7 for rollouts, turns and leases (sortable by time), and secrets for sessions.

Those of one process are in the order in which they were made, also within a millisecond and when the clock is set
back. Order that matters is never read from them: turns have a sequence number.
"""

from __future__ import annotations

import secrets
import threading
import uuid

_COUNTER_BITS = 12
_COUNTER_END = 1 << _COUNTER_BITS


class Uuid7:
    """Makes version 7 UUIDs whose order is that of the calls (RFC 9562, section 6.2, method 1).

    `rand_a` is a counter: each millisecond it begins at a random number with its highest bit clear, so at least 2,048
    follow; when it runs out, or the clock stands or goes back, time is taken from the last identifier.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ms = -1
        self._counter = 0

    def make(self, utc_ns: int, random: bytes | None = None) -> str:
        """The next identifier at a UTC time in ns; `random` is 10 bytes, fresh when left out."""
        noise = int.from_bytes(random if random is not None else secrets.token_bytes(10), "big")
        begin = noise >> 68 & (_COUNTER_END // 2 - 1)
        with self._lock:
            ms = utc_ns // 1_000_000
            if ms > self._ms:
                self._ms, self._counter = ms, begin
            elif self._counter + 1 < _COUNTER_END:
                self._counter += 1
            else:
                self._ms, self._counter = self._ms + 1, begin
            return str(uuid.UUID(int=_version7(self._ms, self._counter, noise)))


_of_this_process = Uuid7()


def uuid7(utc_ns: int) -> str:
    """The next identifier of this process, for a UTC time in ns."""
    return _of_this_process.make(utc_ns)


def new_secret(prefix: str) -> str:
    """A secret of 192 bits with a readable prefix, e.g. `tg-s-…`."""
    return f"{prefix}{secrets.token_hex(24)}"


def _version7(ms: int, counter: int, noise: int) -> int:
    """The bits of section 5.7."""
    value = (ms & ((1 << 48) - 1)) << 80
    value |= 0x7 << 76
    value |= counter << 64
    value |= 0b10 << 62
    return value | noise & ((1 << 62) - 1)
