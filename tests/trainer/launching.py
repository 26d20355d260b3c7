"""A launcher with fake parts in a process of its own, for tests of the launcher; everything below it can be found."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LAUNCH = Path(__file__).with_name("fake_launch.py")
PATIENCE_S = 180.0


@dataclass
class Launch:
    """A launcher in a process of its own; everything below it is known by a mark in its environment."""

    folder: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    process: subprocess.Popen[str] | None = None

    def start(self, *words: str, **moods: str) -> subprocess.Popen[str]:
        env = {**os.environ, "FAKE_MARK": self.mark, **moods}
        self.process = subprocess.Popen(
            [sys.executable, str(LAUNCH), *words],
            env=env,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return self.process

    def run(self, *words: str, **moods: str) -> tuple[int, str, str]:
        process = self.start(*words, **moods)
        out, err = process.communicate(timeout=PATIENCE_S)
        return process.returncode, out, err

    def processes(self) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    # A zombie has no environment left: only what still runs is found.
                    if f"FAKE_MARK={self.mark}".encode() in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
        return found

    def until(self, true: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            value = true()
            if value:
                return value
            time.sleep(0.05)
        raise AssertionError(f"did not come about in {PATIENCE_S} s")

    @property
    def run_folder(self) -> Path:
        return next((self.folder / "runs").iterdir())

    def about(self) -> dict[str, Any]:
        return json.loads((self.run_folder / "run.json").read_text())

    def all_parts_run(self) -> bool:
        try:
            return set(self.about()["parts"]) == {"engine", "gateway", "trainer", "runner"}
        except (StopIteration, OSError, KeyError, ValueError):
            return False

    def kill(self, part: str) -> int:
        """SIGKILL to one part; its process id."""
        pid: int = self.about()["parts"][part]["pid"]
        os.kill(pid, signal.SIGKILL)
        return pid

    def events(self) -> list[dict[str, Any]]:
        path = self.run_folder / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
