"""One rollout: a session, a workspace, the agent, the verifier, and a result that always reaches the gateway.

Whatever goes wrong becomes an `unscorable` result with a cause from a small vocabulary; only cancellation passes
through, after the session was closed as cancelled. The deadline counts from the first line, not from the agent's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from turngate.harnesses.base import Endpoint, Harness, Output, Verdict
from turngate.harnesses.errors import Fault
from turngate.harnesses.install import Installed
from turngate.harnesses.patient import PatientGateway
from turngate.harnesses.sandbox import OPT, Finished, Job, Mount, Sandbox
from turngate.harnesses.settings import RunSettings
from turngate.harnesses.verify import verify
from turngate.harnesses.workspace import Folders, Scratch, remove_tree, write_home
from turngate.proxy import wire
from turngate.tasks.harbor import Task

CAUSES: Mapping[str, str] = {
    "gateway_unavailable": "the gateway did not answer for longer than the runner's patience",
    "gateway_refused": "the gateway refused to open or close the session",
    "sandbox_start": "the sandbox could not be started",
    "harness_exit_N": "the agent ended with status N",
    "harness_timeout": "the agent did not end before the deadline",
    "no_turns": "the agent ended without a single turn",
    "workspace_invalid": "what the agent left cannot be copied for the verifier",
    "verifier_start": "the verifier's sandbox could not be started",
    "verifier_timeout": "the verifier did not end in time",
    "verifier_exit": "the verifier ended with a status other than 0",
    "reward_missing": "the verifier wrote no reward",
    "reward_invalid": "the reward is not a finite number within the task's range",
    "runner_error": "an unexpected error of the runner itself; its text is in runner.jsonl",
}
CANCEL_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class Result:
    """How one rollout ended; a line of runner.jsonl. `detail` is for people, `notes` are the harness's."""

    id: str | None
    task: str
    group: str
    outcome: wire.Outcome
    reward: float | None
    cause: str | None
    detail: str
    seconds: float
    version: int | None
    turns: int
    notes: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The line's object."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Stage:
    """What all rollouts of a run share."""

    settings: RunSettings
    harness: Harness
    installed: Installed
    sandbox: Sandbox
    gateway: PatientGateway
    scratch: Scratch
    faults: Path | None = None

    def request(self, task: Task, group: str) -> wire.NewRollout:
        """The session a rollout asks the gateway for."""
        s = self.settings
        return wire.NewRollout(
            task=task.name,
            group=group,
            group_size=s.group_size,
            group_deadline_s=s.group_deadline_s or 2 * s.deadline_s,
            harness=self.harness.name,
            policy=s.policy,
            pin=s.pin,
            history=s.history,
            training=s.training,
            sampling=s.sampling,
            deadline_s=s.deadline_s + task.verifier_timeout_s + 60.0,
            metadata={
                "harness_version": self.harness.version,
                "sandbox": self.sandbox.name,
                "task_digest": task.digest,
            },
        )


async def run_rollout(stage: Stage, task: Task, group: str) -> Result:
    """One attempt at `task`, from opening its session to closing it."""
    began = time.monotonic()
    try:
        created = await stage.gateway.create(stage.request(task, group))
    except Fault as fault:
        spent = time.monotonic() - began
        return Result(None, task.name, group, "unscorable", None, fault.cause, fault.detail, spent, None, 0)
    detail, turns = "", 0
    try:
        closing, turns = await _play(stage, task, created, began)
    except Fault as fault:
        closing, detail = wire.FinishRollout(outcome="unscorable", cause=fault.cause), fault.detail
    except Exception as error:  # noqa: BLE001 - whatever it is, the session must be closed and the run go on
        closing, detail = wire.FinishRollout(outcome="unscorable", cause="runner_error"), repr(error)
    except asyncio.CancelledError:
        await asyncio.shield(_close_cancelled(stage, created.id))
        raise
    try:
        turns = (await stage.gateway.finish(created.id, closing)).turns
    except Fault as fault:
        closing, detail = wire.FinishRollout(outcome="unscorable", cause=fault.cause), fault.detail
    return Result(
        id=created.id,
        task=task.name,
        group=group,
        outcome=closing.outcome,
        reward=closing.reward,
        cause=closing.cause,
        detail=detail,
        seconds=round(time.monotonic() - began, 3),
        version=created.version,
        turns=turns,
        notes=closing.metrics,
    )


async def _play(stage: Stage, task: Task, created: wire.RolloutCreated, began: float) -> tuple[wire.FinishRollout, int]:
    """Agent, then verifier; the closing words for the gateway and the number of turns."""
    folders = await asyncio.to_thread(stage.scratch.folders, created.id, task)
    try:
        done, verdict = await _act(stage, task, created, folders, began)
        if stage.faults is not None and (done.timed_out or verdict.fault):
            await asyncio.to_thread(_keep_output, stage.faults, created.id, done)
        if done.timed_out:
            raise Fault("harness_timeout", f"not done after {done.seconds:.1f} s")
        if verdict.fault:
            raise Fault(verdict.fault, (done.stderr or done.stdout).strip()[-500:])
        info = await stage.gateway.rollout(created.id)
        if info.turns == 0:
            raise Fault("no_turns", done.stderr.strip()[-500:])
        reward = await verify(task, stage.sandbox, folders, verdict.answer, stage.settings.limits)
    finally:
        await asyncio.to_thread(remove_tree, folders.root)
    metrics = {"agent_s": round(done.seconds, 3), **verdict.notes}
    closing = wire.FinishRollout(reward=reward.value, rewards=dict(reward.parts), metrics=metrics)
    return closing, info.turns


async def _act(
    stage: Stage, task: Task, created: wire.RolloutCreated, folders: Folders, began: float
) -> tuple[Finished, Verdict]:
    """Run the agent to its end or the deadline."""
    settings, harness, sandbox = stage.settings, stage.harness, stage.sandbox
    places = sandbox.places(stage.installed, folders.home, folders.workspace, task.workdir)
    endpoint = Endpoint(sandbox.gateway_url(created.base_url), created.api_key, settings.model or created.policy)
    await asyncio.to_thread(write_home, folders.home, harness.files(endpoint, settings.harness_options))
    address = urlsplit(created.base_url)
    if address.scheme != "http" and sandbox.isolated:
        raise Fault("gateway_refused", f"a sandbox reaches a gateway over http only, not {address.scheme}")
    longest_s = min(settings.deadline_s, task.agent_timeout_s or settings.deadline_s)
    job = Job(
        argv=harness.command(places, endpoint, task.prompts, settings.harness_options),
        env=harness.env(places, endpoint),
        mounts=[
            Mount(folders.home, places.home, writable=True),
            Mount(folders.workspace, places.workspace, writable=True),
            Mount(stage.installed.package, OPT / "harness"),
            Mount(stage.installed.node, OPT / "node"),
        ],
        home=places.home,
        workdir=places.workspace,
        deadline_s=max(0.01, longest_s - (time.monotonic() - began)),
        gateway=(address.hostname or "127.0.0.1", address.port or 80),
        limits=settings.limits,
    )
    done = await sandbox.run(job)
    return done, harness.verdict(Output(done.exit_code, done.stdout, done.stderr))


async def _close_cancelled(stage: Stage, rollout: str) -> None:
    """Tell the gateway, but do not wait long: the run is ending."""
    closing = wire.FinishRollout(outcome="cancelled", cause="runner_stopped")
    try:
        await asyncio.wait_for(stage.gateway.finish(rollout, closing), CANCEL_PATIENCE_S)
    except (Fault, TimeoutError):
        return


def _keep_output(folder: Path, rollout: str, done: Finished) -> None:
    """Keep what a failed agent printed, for people."""
    folder.mkdir(parents=True, exist_ok=True)
    head = f"exit {done.exit_code}, timed out {done.timed_out}, {done.seconds:.1f} s\n"
    (folder / f"{rollout}.log").write_text(f"{head}--- stdout\n{done.stdout}\n--- stderr\n{done.stderr}\n")
