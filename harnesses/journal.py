"""What a run has begun and finished, in its `out` folder, so that a runner that was killed goes on where it was.

`journal.jsonl` has a line a group, written before its first rollout; `runner.jsonl` a line a finished rollout. A line
that was cut by a kill is ignored. One runner at a time holds the folder.
"""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import IO, Any, Self
from uuid import uuid4

from turngate.harnesses.errors import OutBusy, SettingsWrong
from turngate.harnesses.groups import Group, Slot
from turngate.harnesses.rollout import Result
from turngate.tasks.harbor import Task

GROUPS, RESULTS = "journal.jsonl", "runner.jsonl"
FIELDS = frozenset(field.name for field in fields(Result))


class Journal:
    """The records of one run; without a folder nothing is kept. `run` names it in the sessions' metadata."""

    def __init__(self, out: Path | None) -> None:
        self._out = out
        self._lock: IO[str] | None = None
        self.run = uuid4().hex
        self.lines: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        if self._out is None:
            return self
        try:
            self._out.mkdir(parents=True, exist_ok=True)
            self._lock = (self._out / GROUPS).open("a+", encoding="utf-8")
        except OSError as error:
            raise SettingsWrong(f"out: {self._out} cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise OutBusy(
                f"{self._out}: another runner works in this folder; end it, or choose another `out`"
            ) from None
        self.lines = list(_read(self._out / GROUPS))
        head = self.lines[0] if self.lines and "run" in self.lines[0] else None
        if head is None:
            self._write(GROUPS, {"run": self.run})
        else:
            self.run = str(head["run"])
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.close()

    def begun(self, group: Group) -> None:
        """Keep that a group has begun."""
        line = {"group": group.name, "task": group.task.name, "size": group.size, "attempts": group.attempts}
        self._write(GROUPS, line)

    def ended(self, slot: Slot, result: Result) -> None:
        """Keep one result."""
        self._write(RESULTS, {"time": time.time(), "index": slot.index, **result.as_json()})

    def groups(self, tasks: Sequence[Task]) -> list[Group]:
        """Groups begun before, all their attempts pending; those of tasks that are not there any more are left out."""
        known = {task.name: task for task in tasks}
        return [
            Group(known[line["task"]], line["group"], line["size"], line["attempts"], list(range(line["attempts"])))
            for line in self.lines
            if line.get("task") in known
        ]

    def results(self) -> dict[tuple[str, int], Result]:
        """The last result of every slot that counts.

        Rollouts that ended because the runner stopped do not, nor those that never had a session.
        """
        found: dict[tuple[str, int], Result] = {}
        for line in _read(self._out / RESULTS) if self._out is not None else ():
            had_session = line.get("id") is not None or line.get("cause") == "group_closed"
            if had_session and line.get("cause") != "runner_stopped" and "index" in line:
                values = {key: value for key, value in line.items() if key in FIELDS}
                found[line["group"], line["index"]] = Result(**{**values, "retried": tuple(values.get("retried", ()))})
        return found

    def _write(self, name: str, line: dict[str, Any]) -> None:
        if self._out is None:
            return
        path = self._out / name
        with path.open("a+b") as log:
            log.seek(0, 2)
            if log.tell():
                log.seek(-1, 2)
                if log.read(1) != b"\n":  # cut by a kill
                    log.write(b"\n")
            log.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")


def _read(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            yield line
