"""Workspaces of dataops tasks for tests: made from drafts, solved in a sandbox, graded in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from turngate.harnesses.sandbox import Job, Limits, Mount, Sandbox
from turngate.harnesses.verify import VerifierJob, verify
from turngate.harnesses.workspace import Scratch
from turngate.tasks.dataops import SPLITS
from turngate.tasks.dataops.generate import draft, names
from turngate.tasks.dataops.template import Draft, Template
from turngate.tasks.harbor import Task

SOLUTION = PurePosixPath("/solution")
TOGETHER = 4


@dataclass(frozen=True)
class Case:
    """One task of the set; `number` counts within its template."""

    template: Template
    number: int
    split: str
    made: Draft

    @property
    def name(self) -> str:
        return f"{self.template.name}-{self.number:02d}"

    @property
    def outputs(self) -> list[str]:
        """The paths on which the reward depends, gates left out."""
        found = [check["path"] for check in self.made.checks if not check.get("gate") and check["kind"] != "absent"]
        return list(dict.fromkeys(found))


def all_cases() -> list[Case]:
    """The 240 tasks of seed 0."""
    return [Case(one, number, split, draft(one, number)) for split in SPLITS for one, number in names(split)]


def fill(folder: Path, files: Mapping[str, str]) -> Path:
    """Write files below `folder`."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@dataclass(frozen=True)
class Solved:
    """The verifier's reward, and the text of every file of the judged workspace."""

    reward: float
    files: Mapping[str, str]


async def act_and_verify(task: Task, script: str, sandbox: Sandbox, scratch: Scratch) -> Solved:
    """Run a bash script in the task's workspace, then its verifier, both in the sandbox."""
    folders = scratch.folders(task.folder.name, task.environment)
    places = sandbox.places(None, folders.home, folders.workspace, task.workdir)
    mounts = [
        Mount(folders.home, places.home, writable=True),
        Mount(folders.workspace, places.workspace, writable=True),
    ]
    job = Job(["bash", "-c", script], {}, mounts, places.home, places.workspace, 60.0)
    await sandbox.run(job)
    reward = await verify(task, sandbox, VerifierJob(folders, "", Limits()))
    files = {
        str(path.relative_to(folders.judged)): path.read_text()
        for path in folders.judged.rglob("*")
        if path.is_file() and not path.is_symlink() and "__pycache__" not in path.parts
    }
    return Solved(reward.value, files)


async def all_verified(
    tasks: Sequence[Task], scripts: Sequence[str], sandbox: Sandbox, scratch: Scratch
) -> dict[str, Solved]:
    """Several at once; by the name of the task."""
    gate = asyncio.Semaphore(TOGETHER)

    async def one(task: Task, script: str) -> tuple[str, Solved]:
        async with gate:
            return task.name, await act_and_verify(task, script, sandbox, scratch)

    return dict(await asyncio.gather(*(one(*pair) for pair in zip(tasks, scripts, strict=True))))
