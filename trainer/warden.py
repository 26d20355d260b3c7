"""The warden: parent of all processes of a run, and the one that ends them all when the launcher is gone.

Run as a program with one end of a socket pair. It is a child subreaper, so a grandchild that detaches becomes its child
instead of init's, and can be found. Parts are subreapers too, so what a dead one leaves falls to the warden, which ends
it before it tells of the death. When the socket closes, for whatever reason (SIGKILL of the launcher too), it kills
everything below it and waits until it is gone. It must never outlive its children, nor import more than the standard
library: it starts in an instant and does not fail where the environment is broken.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from typing import Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
POLL_S = 0.1
KILL_WAIT_S = 30.0

_libc = ctypes.CDLL(None, use_errno=True)


def descendants(root: int, without: Collection[int] = ()) -> list[int]:
    """All processes below `root`, by /proc, but not `without` and what is below them.

    Those that end meanwhile may be missing, and so may what was below them a moment ago.
    """
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{entry}/stat", "rb") as stat:
                # The command's name, in brackets, may hold anything, brackets and spaces too.
                parent = int(stat.read().rpartition(b")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry))
    found: list[int] = []
    waiting = [root]
    while waiting:
        below = [pid for pid in children.get(waiting.pop(), []) if pid not in without]
        found += below
        waiting += below
    return found


class Warden:
    """Spawns, signals and reaps on the launcher's word; one JSON object a line, both ways."""

    def __init__(self, launcher: socket.socket) -> None:
        self._launcher = launcher
        self._names: dict[int, str] = {}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._ended: list[tuple[str, int]] = []
        self._unread = b""

    def serve(self) -> None:
        """Until the launcher closes its end or sends nonsense; then everything below is killed."""
        try:
            self._listen()
        finally:
            self.kill_all()

    def _listen(self) -> None:
        while True:
            readable, _, _ = select.select([self._launcher], [], [], POLL_S)
            self._reap()
            if not readable:
                continue
            data = self._receive()
            if not data:
                return
            self._unread += data
            *lines, self._unread = self._unread.split(b"\n")
            for line in lines:
                self._obey(json.loads(line))

    def kill_all(self) -> list[int]:
        """SIGKILL everything below, again and again until nothing is; returns what could not be ended in time."""
        left = self._kill_until_gone(lambda: descendants(os.getpid()))
        self._tell()
        return left

    def _kill_until_gone(self, wanted: Callable[[], list[int]]) -> list[int]:
        give_up_at = time.monotonic() + KILL_WAIT_S
        while left := wanted():
            if time.monotonic() > give_up_at:
                return left
            for pid in left:
                _kill(pid, signal.SIGKILL)
            time.sleep(0.02)
            self._wait()
        return []

    def _orphans(self) -> list[int]:
        """What is below the warden but below no part that runs."""
        return descendants(os.getpid(), {process.pid for process in self._running.values()})

    def _obey(self, order: dict[str, Any]) -> None:
        if order["op"] == "spawn":
            self._spawn(order)
        elif order["op"] == "signal":
            process = self._running.get(order["name"])
            if process is not None:
                _kill(process.pid, order["signal"])
        elif order["op"] == "kill":
            process = self._running.get(order["name"])
            if process is not None:
                for pid in [*descendants(process.pid), process.pid]:
                    _kill(pid, signal.SIGKILL)
        elif order["op"] == "kill_all":
            self._say({"event": "empty", "left": self.kill_all()})

    def _spawn(self, order: dict[str, Any]) -> None:
        try:
            with open(order["log"], "ab") as log:
                process = subprocess.Popen(
                    order["argv"],
                    env=order["env"],
                    cwd=order["cwd"],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=_die_with(os.getpid()),
                )
        except OSError as error:
            self._say({"event": "failed", "name": order["name"], "why": str(error)})
            return
        self._running[order["name"]] = process
        self._names[process.pid] = order["name"]
        self._say({"event": "started", "name": order["name"], "pid": process.pid})

    def _reap(self) -> None:
        """Take in what ended, end what it left behind, then tell."""
        self._wait()
        if self._ended:
            self._kill_until_gone(self._orphans)
            self._tell()

    def _tell(self) -> None:
        for name, code in self._ended:
            self._say({"event": "exited", "name": name, "code": code})
        self._ended.clear()

    def _wait(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            name = self._names.pop(pid, None)
            if name is not None:
                code = os.waitstatus_to_exitcode(status)
                self._running.pop(name).returncode = code
                self._ended.append((name, code))

    def _receive(self) -> bytes:
        try:
            return self._launcher.recv(1 << 16)
        except ConnectionError:
            return b""

    def _say(self, event: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # a launcher that is gone is seen at the next read
            self._launcher.sendall(json.dumps(event).encode() + b"\n")


def _die_with(parent: int) -> Callable[[], None]:
    def prepare() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return prepare


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _ignore(*_: object) -> None:
    """A handler, not SIG_IGN: children would inherit that and never hear an interrupt."""


def main() -> None:
    """`warden.py FD`: serve the launcher at the other end of FD."""
    if _libc.prctl(PR_SET_CHILD_SUBREAPER, 1) != 0:
        sys.exit(f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(ctypes.get_errno())}")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _ignore)
    with socket.socket(fileno=int(sys.argv[1])) as launcher:
        Warden(launcher).serve()


if __name__ == "__main__":
    main()
