"""Looking for secrets where none may be: arguments of every process, all bytes below a folder."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

EVERY_S = 0.03


class CommandLines:
    """While entered, collects the arguments of every process of this machine, as anyone on it can read them."""

    def __init__(self) -> None:
        self.seen: set[bytes] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def look(self) -> None:
        """Collect once."""
        for process in Path("/proc").iterdir():
            if process.name.isdigit():
                try:
                    self.seen.add((process / "cmdline").read_bytes())
                except OSError:
                    continue

    def has(self, *words: str) -> bool:
        """Whether a process with all these words was seen: a watch that saw nothing proves nothing."""
        return any(all(word.encode() in line for word in words) for line in self.seen)

    def _watch(self) -> None:
        while not self._stop.is_set():
            self.look()
            time.sleep(EVERY_S)


def environment(pid: int) -> bytes:
    """The environment that a process was started with."""
    return Path(f"/proc/{pid}/environ").read_bytes()


def children(pid: int) -> list[int]:
    """Processes that a process started."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(word) for word in (task / "children").read_text().split()]
    return found


def files_with(secrets: Iterable[str], folder: Path) -> list[Path]:
    """Files below `folder` that hold one of `secrets`, in whatever part of them."""
    wanted = [secret.encode() for secret in secrets]
    return [
        file
        for file in sorted(folder.rglob("*"))
        if file.is_file() and any(secret in file.read_bytes() for secret in wanted)
    ]
