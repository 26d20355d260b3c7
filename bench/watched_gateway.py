#!/usr/bin/env python3
"""`turngate proxy` whose event loop is watched closely: what held it, and for how long. For `gateway.py --watch-loop`.

A timer in the loop runs every 5 ms; a thread looks at how late it is, and takes the main thread's stack once it is
later than `HELD_S`. Of a late beat the time in which the loop's thread was ready but had no core is no fault of the
gateway's: the rest, `own_ms`, is its CPU and what it was blocked by (the kernel counts the wait, in `schedstat`).
The first argument is the file that gets one JSON line a late beat, the others are as for `turngate`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

BEAT_S = 0.005
HELD_S = 0.05


class Watch:
    """The beats of one event loop."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._beat_s = time.monotonic()
        self._stack: list[str] = []

    async def watch(self, observe: Callable[[float], None]) -> None:
        """Beat, and tell `observe` how late each beat was, in s, until cancelled."""
        threading.Thread(target=self._look, args=(threading.get_ident(),), daemon=True).start()
        schedstat = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        waited_s, cpu_s = _waited_s(schedstat), time.thread_time()
        while True:
            self._beat_s = time.monotonic()
            await asyncio.sleep(BEAT_S)
            late_s = time.monotonic() - self._beat_s - BEAT_S
            wait_s, ran_s = _waited_s(schedstat) - waited_s, time.thread_time() - cpu_s
            waited_s, cpu_s = waited_s + wait_s, cpu_s + ran_s
            observe(max(0.0, late_s))
            if late_s > HELD_S:
                stall = {"late_ms": late_s, "own_ms": late_s - wait_s, "cpu_ms": ran_s}
                line = {key: round(value * 1e3, 1) for key, value in stall.items()} | {"stack": self._stack}
                with self._out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
            self._stack = []

    def _look(self, thread: int) -> None:
        while True:
            time.sleep(BEAT_S * 2)
            if time.monotonic() - self._beat_s - BEAT_S > HELD_S and not self._stack:
                frames = traceback.extract_stack(sys._current_frames()[thread])[-8:]
                self._stack = [f"{Path(one.filename).name}:{one.lineno} {one.name}" for one in frames]


def _waited_s(schedstat: Path) -> float:
    """How long the thread waited for a core so far, in s; 0 where the kernel does not count it: then all is its own."""
    try:
        return int(schedstat.read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


def main() -> int:
    """Put the watch in the place of the gateway's own, which looks ten times a second."""
    from turngate.proxy import cli, vitals

    vitals.watch_loop_lag = Watch(Path(sys.argv.pop(1))).watch
    return cli.main(sys.argv[1:])


if __name__ == "__main__":
    raise SystemExit(main())
