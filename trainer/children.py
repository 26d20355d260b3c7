"""The launcher's hold on its processes: start, watch, signal, end, through the warden.

All children live below the warden (see `warden.py`), each in its own session with its own log. This side must never
report a process as gone before the warden has waited for it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from turngate.trainer.errors import TrainerError

WARDEN = Path(__file__).with_name("warden.py")
KILL_TIMEOUT_S = 40.0


class ChildError(TrainerError):
    """A process could not be started, ended by itself, or could not be ended."""


@dataclass
class Child:
    """One process of the run. `code` is None while it runs, else its exit status, negative for a signal."""

    name: str
    pid: int
    log: Path
    code: int | None = None
    started_s: float = field(default_factory=time.monotonic)

    @property
    def alive(self) -> bool:
        """Whether it has not been waited for yet."""
        return self.code is None

    def reason(self, lines: int = 12) -> str:
        """How it ended, with the last lines of its log."""
        if self.code is None:
            how = "is running"
        elif self.code < 0:
            how = f"was ended by {signal.Signals(-self.code).name}"
        else:
            how = f"ended with status {self.code}"
        return f"{self.name} (pid {self.pid}) {how}; the last lines of {self.log}:\n{tail(self.log, lines)}"


def tail(log: Path, lines: int) -> str:
    """The last `lines` lines of a log, indented; at most 64 kB of it are read."""
    try:
        with log.open("rb") as handle:
            handle.seek(max(0, log.stat().st_size - 65536))
            text = handle.read().decode("utf-8", "replace")
    except OSError as error:
        return f"    (cannot be read: {error})"
    kept = [line.rstrip()[:400] for line in text.splitlines() if line.strip()][-lines:]
    return "\n".join(f"    {line}" for line in kept) or "    (nothing was written)"


class Children:
    """All processes of a run; leaving the context ends every one of them, grandchildren too."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._unread = b""
        self.by_name: dict[str, Child] = {}
        ours, theirs = socket.socketpair()
        self._socket = ours
        with theirs:
            self._warden = subprocess.Popen(
                [sys.executable, "-I", "-S", str(WARDEN), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    @property
    def warden_pid(self) -> int:
        """The process all children live below."""
        return self._warden.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def start(self, name: str, argv: Sequence[str], env: Mapping[str, str] | None = None) -> Child:
        """Start a process with output to `logs/NAME.log`; `env` is added to ours. Raises ChildError."""
        log = self._logs / f"{name}.log"
        order = {"op": "spawn", "name": name, "argv": list(argv), "cwd": os.getcwd(), "log": str(log.absolute())}
        self._order({**order, "env": {**os.environ, **(env or {})}})
        event = self._await(lambda event: event["event"] in ("started", "failed") and event["name"] == name)
        if event["event"] == "failed":
            raise ChildError(f"cannot start {name} ({argv[0]}): {event['why']}")
        return self.by_name[name]

    def poll(self) -> None:
        """Take in what ended since the last call."""
        while select.select([self._socket], [], [], 0)[0]:
            self._read()

    def send(self, child: Child, number: signal.Signals) -> None:
        """Send a signal to the process itself, not to its descendants."""
        if child.alive:
            self._order({"op": "signal", "name": child.name, "signal": int(number)})

    def kill(self, child: Child) -> None:
        """SIGKILL to the process and everything below it."""
        if child.alive:
            self._order({"op": "kill", "name": child.name})

    def wait(self, child: Child, timeout_s: float) -> bool:
        """Whether the process has ended within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        self.poll()
        while child.alive and time.monotonic() < deadline:
            time.sleep(0.05)
            self.poll()
        return not child.alive

    def stop(self, child: Child, number: signal.Signals | None, grace_s: float) -> None:
        """Ask with a signal (None: it was asked already), kill after `grace_s`, and wait until it is gone.

        Raises ChildError when it does not go, even so.
        """
        if number is not None:
            self.send(child, number)
        if not self.wait(child, grace_s):
            self.kill(child)
            if not self.wait(child, KILL_TIMEOUT_S):
                raise ChildError(f"{child.name} (pid {child.pid}) does not end, even by SIGKILL")

    def close(self) -> None:
        """End everything below the warden at once, then the warden. Raises ChildError when something stays."""
        if self._socket.fileno() < 0:
            return
        left: list[int] = []
        # One more Ctrl-C must not leave this half done.
        masked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
        try:
            self._order({"op": "kill_all"})
            left = self._await(lambda event: event["event"] == "empty")["left"]
        except ChildError:
            pass  # the warden is gone, and by PR_SET_PDEATHSIG its children with it
        finally:
            self._socket.close()
            self._warden.wait()
            signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        if left:
            raise ChildError(f"processes {left} do not end, even by SIGKILL")

    def _order(self, order: dict[str, Any]) -> None:
        try:
            self._socket.sendall(json.dumps(order).encode() + b"\n")
        except OSError as error:
            raise ChildError(f"the warden (pid {self._warden.pid}) is gone: {error}") from error

    def _await(self, wanted: Any) -> dict[str, Any]:
        deadline = time.monotonic() + KILL_TIMEOUT_S
        while time.monotonic() < deadline:
            if select.select([self._socket], [], [], 1.0)[0]:
                for event in self._read():
                    if wanted(event):
                        return event
        raise ChildError(f"the warden (pid {self._warden.pid}) does not answer")

    def _read(self) -> list[dict[str, Any]]:
        try:
            data = self._socket.recv(1 << 16)
        except ConnectionError:
            data = b""
        if not data:
            raise ChildError(f"the warden (pid {self._warden.pid}) is gone; every process of the run ended with it")
        self._unread += data
        *lines, self._unread = self._unread.split(b"\n")
        events: list[dict[str, Any]] = [json.loads(line) for line in lines]
        for event in events:
            if event["event"] == "started":
                name = event["name"]
                self.by_name[name] = Child(name, event["pid"], self._logs / f"{name}.log")
            elif event["event"] == "exited":
                self.by_name[event["name"]].code = event["code"]
        return events
