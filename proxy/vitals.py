"""The gateway's own pulse: how late its event loop runs, what its process holds, whether its store can be written.

For `/metrics` and `/readyz`; cheap enough to be asked every second. It never touches a turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import resource
from collections.abc import Callable
from pathlib import Path

from turngate.proxy.store.space import free_space_bytes

LOOK_S = 0.5
TRIM_S = 10.0
PROBE_BYTES = 4096

GARBAGE_THRESHOLDS = (5_000, 10, 10)
"""Python's own are (700, 10, 10); a request's body alone makes thousands of objects."""


async def watch_loop_lag(observe: Callable[[float], None]) -> None:
    """Tell `observe` how late a timer ran, in seconds, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + LOOK_S
        await asyncio.sleep(LOOK_S)
        observe(max(0.0, loop.time() - due_s))


async def give_memory_back(turns: Callable[[], int], every_s: float = TRIM_S) -> None:
    """Now and then, until cancelled, give the system what the allocator holds unused; only while `turns` grows.

    Bodies and prompts of some hundred kB come and go between small things that stay, so most of it lies in gaps.
    """
    seen = turns()
    while True:
        await asyncio.sleep(every_s)
        if turns() != seen:
            seen = turns()
            await asyncio.to_thread(trim)


def trim() -> None:
    """Give unused memory back to the system, where the C library can: glibc's does so by itself only at the end."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def settle_garbage() -> None:
    """Call once all is loaded: what is there now stays, and need not be walked again by each garbage collection.

    A full collection walks every object: over modules and routes alone it held the event loop for tens of milliseconds.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    trim()


def process_gauges() -> dict[str, float]:
    """Memory, file descriptors and CPU time of this process; what the system does not tell is left out."""
    spent = resource.getrusage(resource.RUSAGE_SELF)
    found = {"process_cpu_seconds_total": spent.ru_utime + spent.ru_stime}
    with contextlib.suppress(OSError, ValueError, IndexError):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        found["process_resident_memory_bytes"] = float(pages * resource.getpagesize())
        found["process_open_fds"] = float(len(os.listdir("/proc/self/fd")))
    return found


def unwritable(folder: Path, min_free_bytes: int = 0) -> str | None:
    """Why no turn can be kept in `folder`, None when one can: a page is written and removed, free space looked at."""
    probe = folder / f".ready-{os.getpid()}"
    try:
        probe.write_bytes(b"\0" * PROBE_BYTES)
    except OSError as error:
        return f"the store at {folder} cannot be written: {error.strerror}"
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    free_bytes = free_space_bytes(folder)
    if free_bytes >= min_free_bytes:
        return None
    return f"the store at {folder} has {free_bytes} bytes of space, min_free_bytes is {min_free_bytes}"
