"""Whether the disk still takes what a turn would need: asked before sampling, because afterwards it is too late.

Two signs: free space below the reserve, and a write that failed (a quota or a limit shows in no free space). After the
second, a small file is written, at most once in a while, to see whether space has returned. It never deletes anything.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from turngate.proxy.store.errors import StoreFull

PROBE_BYTES = 65_536
PROBE_EVERY_S = 0.5


def free_space_bytes(folder: Path) -> int:
    """What the file system of `folder` has left for this user. Raises OSError where there is no such folder."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


class SpaceProbe:
    """Free space of the store at `folder`; `min_free_bytes` are kept for what is under way and for results."""

    def __init__(self, folder: Path, min_free_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._min_free_bytes = min_free_bytes
        self._clock = clock
        self._probed_s: float | None = None
        """When the last probe failed, or a write did; None while all is well."""

    def check(self) -> None:
        """Microseconds while all is well.

        Raises:
            StoreFull: nothing more should be sampled.
        """
        try:
            free_bytes = free_space_bytes(self._folder)
        except OSError as error:
            raise StoreFull(f"the store's folder cannot be reached: {error.strerror}; nothing is sampled") from error
        if free_bytes < self._min_free_bytes:
            raise StoreFull(
                f"{free_bytes} bytes are free for the store, min_free_bytes is {self._min_free_bytes}: nothing is "
                "sampled until there is space again"
            )
        if self._probed_s is not None:
            self._probe(self._probed_s)

    def failed(self) -> None:
        """A write failed for want of space: believe it until a probe can be written."""
        self._probed_s = self._clock()

    def _probe(self, last_s: float) -> None:
        now_s = self._clock()
        if now_s - last_s >= PROBE_EVERY_S:
            self._probed_s = now_s
            if self._writable():
                self._probed_s = None
                return
        raise StoreFull("the last write of the store failed for want of space: nothing is sampled until one succeeds")

    def _writable(self) -> bool:
        path = self._folder / f".space.{os.getpid()}"
        try:
            with open(path, "wb") as file:
                file.write(bytes(PROBE_BYTES))
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            return False
        finally:
            path.unlink(missing_ok=True)
        return True
