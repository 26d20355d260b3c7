"""Running a task's verifier: in a sandbox of its own, on a copy of the workspace, after the agent is gone.

The agent never saw tests/, and the folder that receives the reward did not exist for it, so a reward can only come
from the verifier. No network.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from turngate.harnesses.errors import Fault
from turngate.harnesses.sandbox import Job, Limits, Mount, Sandbox
from turngate.harnesses.workspace import Folders, copy_workspace, write_answer
from turngate.tasks.errors import RewardInvalid
from turngate.tasks.harbor import Task
from turngate.tasks.rewards import Reward, read_reward

TESTS = PurePosixPath("/tests")
REWARDS = PurePosixPath("/logs/verifier")


@dataclass(frozen=True, slots=True)
class VerifierJob:
    """What the agent left, and in what the verifier runs: the same image, limits of its own, `disk` watched."""

    folders: Folders
    answer: str
    limits: Limits
    image: str | None = None
    disk: tuple[Path, ...] = ()


async def verify(task: Task, sandbox: Sandbox, given: VerifierJob) -> Reward:
    """Copy the workspace, run tests/test.sh, read the reward.

    Raises:
        Fault: `workspace_invalid`, `verifier_start`, `verifier_timeout`, `verifier_exit`, `reward_missing` or
            `reward_invalid`.
    """
    folders, limits = given.folders, given.limits
    await asyncio.to_thread(_prepare, task, folders, given.answer, limits)
    places = sandbox.places(None, folders.home, folders.judged, task.workdir)
    tests, rewards = sandbox.path(task.tests, TESTS), sandbox.path(folders.rewards, REWARDS)
    job = Job(
        argv=[_shell(task.tests / "test.sh"), str(tests / "test.sh")],
        env={
            "TURNGATE_TESTS": str(tests),
            "TURNGATE_REWARDS": str(rewards),
            "TURNGATE_WORKSPACE": str(places.workspace),
            **task.verifier_env,
        },
        mounts=[
            Mount(folders.judged, places.workspace, writable=True),
            Mount(task.tests, TESTS),
            Mount(folders.rewards, REWARDS, writable=True),
        ],
        home=PurePosixPath("/tmp"),
        workdir=places.workspace,
        deadline_s=task.verifier_timeout_s,
        limits=limits,
        image=given.image,
        disk=given.disk,
    )
    try:
        done = await sandbox.run(job)
    except Fault as fault:
        raise Fault("verifier_start", fault.detail) from fault
    if done.exceeded:
        raise Fault("verifier_exit", f"{done.exceeded}: it wrote more than limits.workspace_bytes")
    if done.timed_out:
        raise Fault("verifier_timeout", f"no result within {task.verifier_timeout_s:g} s")
    if done.exit_code != 0:
        raise Fault("verifier_exit", f"status {done.exit_code}: {(done.stderr or done.stdout).strip()[-500:]}")
    try:
        return read_reward(folders.rewards, task.reward_low, task.reward_high)
    except RewardInvalid as error:
        raise Fault(error.cause, error.detail) from error


def _prepare(task: Task, folders: Folders, answer: str, limits: Limits) -> None:
    copy_workspace(folders.workspace, folders.judged, limits.workspace_bytes)
    if task.answer_file is not None:
        write_answer(folders.judged, task.answer_file, answer)


def _shell(script: Path) -> str:
    """Harbor starts test.sh with bash; a script that says `#!/bin/sh` is taken at its word."""
    with script.open("rb") as handle:
        return "sh" if handle.readline().strip() == b"#!/bin/sh" else "bash"
