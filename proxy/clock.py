"""UTC that cannot jump: read once when made, from then on moved by the clock that nobody sets.

Ages of sessions, terms of leases and deadlines of groups are differences of UTC times that may have been stored by an
earlier process. A wall clock that is set back or forward must not end, lengthen or reorder any of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable


def elapsed_ns() -> int:
    """Nanoseconds since some fixed moment; also counts while the machine sleeps, where the system can tell."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic_ns() if boot is None else time.clock_gettime_ns(boot)


class SteadyUtc:
    """A clock: called, it gives UTC ns that only grow. One a process, made at its start.

    Args:
        wall_ns: UTC now; asked once.
        elapsed_ns: what moves it.
    """

    def __init__(self, wall_ns: Callable[[], int] | None = None, elapsed_ns: Callable[[], int] = elapsed_ns) -> None:
        self._elapsed_ns = elapsed_ns
        self._offset_ns = (wall_ns or time.time_ns)() - elapsed_ns()

    def __call__(self) -> int:
        """UTC now, in ns."""
        return self._offset_ns + self._elapsed_ns()
