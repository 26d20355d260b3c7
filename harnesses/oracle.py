"""The oracle: a task's own solution, run where an agent would be and judged as an agent's work is.

A task whose solution does not earn its full reward teaches nothing but its own mistake; this finds out beforehand.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from turngate.harnesses.errors import Fault
from turngate.harnesses.sandbox import Ground, Job, Limits, Mount, Sandbox
from turngate.harnesses.verify import VerifierJob, verify
from turngate.harnesses.workspace import Folders, Scratch, remove_rollout
from turngate.tasks.harbor import Task

SOLUTION = PurePosixPath("/solution")
DEFAULT_TIMEOUT_S = 600.0
ANSWER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Played:
    """What a solution earned; `problem` is empty when that is the full reward."""

    task: str
    reward: float | None
    problem: str


async def play_oracle(task: Task, number: int, sandbox: Sandbox, scratch: Scratch, limits: Limits) -> Played:
    """Run solution/solve.sh in the workspace, then the verifier."""
    script = task.folder / "solution" / "solve.sh"
    if not script.is_file():
        return Played(task.name, None, f"{script}: missing; write the commands that solve the task")
    try:
        ground = await sandbox.prepare(task)
        folders = await asyncio.to_thread(scratch.folders, f"oracle-{number}", ground.files)
        try:
            answer = await _solve(task, script, ground, folders, sandbox, scratch, limits)
            watched = scratch.watched(folders.judged, folders.rewards)
            reward = await verify(task, sandbox, VerifierJob(folders, answer, limits, ground.image, watched))
        finally:
            await asyncio.to_thread(remove_rollout, folders.root)
    except Fault as fault:
        return Played(task.name, None, f"{task.folder}: {fault.cause}: {fault.detail}")
    if reward.value < task.reward_high:
        earned = f"the solution earns {reward.value:g} of {task.reward_high:g}"
        return Played(task.name, reward.value, f"{script}: {earned}; mend it or {task.tests / 'test.sh'}")
    return Played(task.name, reward.value, "")


async def _solve(
    task: Task,
    script: Path,
    ground: Ground,
    folders: Folders,
    sandbox: Sandbox,
    scratch: Scratch,
    limits: Limits,
) -> str:
    """Run the script; the answer it wrote, or else what it printed."""
    places = sandbox.places(None, folders.home, folders.workspace, task.workdir)
    solution = sandbox.path(script.parent, SOLUTION)
    with script.open("rb") as handle:
        shell = "sh" if handle.readline().strip() == b"#!/bin/sh" else "bash"
    job = Job(
        argv=[shell, str(solution / "solve.sh")],
        env={"TURNGATE_WORKSPACE": str(places.workspace)},
        mounts=[
            Mount(folders.home, places.home, writable=True),
            Mount(folders.workspace, places.workspace, writable=True),
            Mount(script.parent, SOLUTION),
        ],
        home=places.home,
        workdir=places.workspace,
        deadline_s=task.agent_timeout_s or DEFAULT_TIMEOUT_S,
        limits=limits,
        image=ground.image,
        disk=scratch.watched(folders.home, folders.workspace),
    )
    done = await sandbox.run(job)
    if done.timed_out or done.exit_code != 0:
        how = "did not end in time" if done.timed_out else f"ended with status {done.exit_code}"
        raise Fault("solution_failed", f"solve.sh {how}: {(done.stderr or done.stdout).strip()[-300:]}")
    answer = folders.workspace / (task.answer_file or "answer.txt")
    if task.answer_file is not None and answer.is_file() and not answer.is_symlink():
        with answer.open("rb") as handle:
            return handle.read(ANSWER_BYTES).decode("utf-8", "replace")
    return done.stdout


async def play_all(
    tasks: Sequence[Task], sandbox: Sandbox, scratch: Scratch, limits: Limits, at_once: int
) -> list[Played]:
    """Every task's oracle, `at_once` at a time, in the order of the tasks."""
    room = asyncio.Semaphore(at_once)

    async def one(number: int, task: Task) -> Played:
        async with room:
            return await play_oracle(task, number, sandbox, scratch, limits)

    return list(await asyncio.gather(*(one(number, task) for number, task in enumerate(tasks))))
