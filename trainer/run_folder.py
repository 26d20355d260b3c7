"""One run, one folder: `runs/<id>/` with its lock, configuration, logs, store, checkpoints and adapters.

The lock is an flock, so it vanishes with its holder, however that ends; `run.json` says what the run is and how it
ended. Two launchers must never work in one folder.
"""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

from turngate.trainer.errors import TrainerError


class RunFolderError(TrainerError):
    """The folder cannot be used; the message says why and what to do."""


class RunFolder:
    """Paths of a run and its lock, held from construction until `close` or the end of the process."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.id = self.path.name
        self.config = self.path / "config.yaml"
        self.about = self.path / "run.json"
        self.logs = self.path / "logs"
        self.store = self.path / "store"
        self.admin_key = self.store / "admin.key"
        self.metrics = self.path / "metrics.jsonl"
        self.events = self.path / "events.jsonl"
        self.resumed = (self.store / "control.sqlite").exists()
        self._lock = self._take_lock()
        for folder in (self.logs, self.store):
            folder.mkdir(exist_ok=True)

    @classmethod
    def new(cls, out: Path, name: str, now: datetime.datetime) -> RunFolder:
        """Make `out/NAME-DATE-TIME`, with a number behind it where that is taken."""
        stem = f"{name}-{now:%Y%m%d-%H%M%S}"
        for count in range(100):
            path = out / (stem if count == 0 else f"{stem}-{count}")
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError as error:
                raise RunFolderError(f"cannot make the run's folder {path}: {error.strerror}") from error
            return cls(path)
        raise RunFolderError(f"{out / stem} and a hundred more are taken: choose another name or folder")

    @classmethod
    def existing(cls, out: Path, run: str) -> RunFolder:
        """The folder of an earlier run, by path or by id below `out`."""
        for path in (Path(run), out / run):
            if (path / "config.yaml").is_file():
                return cls(path)
        raise RunFolderError(f"no run {run!r}: neither {Path(run)} nor {out / run} holds a config.yaml")

    def update(self, **changes: Any) -> None:
        """Merge `changes` into run.json, replacing the file at once."""
        about = json.loads(self.about.read_text()) if self.about.is_file() else {}
        about.update(changes)
        scratch = self.about.with_suffix(".json.new")
        scratch.write_text(json.dumps(about, indent=1) + "\n")
        scratch.replace(self.about)

    def event(self, name: str, **facts: Any) -> None:
        """Add a line to events.jsonl: what happened to the parts of the run, and every alarm."""
        with self.events.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": time.time(), "event": name, **facts}) + "\n")

    def restarts(self) -> dict[str, int]:
        """How often each part was started again, over all launches in this folder; the others are left out."""
        return dict(Counter(event["part"] for event in self._told("started") if event["restarts"]))

    def alarms(self) -> list[str]:
        """Every alarm of all launches in this folder, oldest first."""
        return [event["text"] for event in self._told("alarm")]

    def _told(self, name: str) -> list[dict[str, Any]]:
        if not self.events.exists():
            return []
        events = [json.loads(line) for line in self.events.read_text(encoding="utf-8").splitlines()]
        return [event for event in events if event["event"] == name]

    def close(self) -> None:
        """Give the lock back."""
        os.close(self._lock)

    def _take_lock(self) -> int:
        try:
            lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise RunFolderError(f"{self.path} cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 32, 0).decode() or "unknown"
            os.close(lock)
            raise RunFolderError(f"{self.path} is in use by the launcher with pid {holder}; stop that first") from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
        return lock
