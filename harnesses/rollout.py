"""One rollout: a session, a workspace, the agent, the verifier, and a result that always reaches the gateway.

Whatever goes wrong becomes an `unscorable` result with a cause from a small vocabulary; only cancellation passes
through, after the session was closed as cancelled. The deadline counts from the first line, not from the agent's.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from turngate.harnesses.base import Endpoint, Harness, HarnessOptions, InProcess, Output, Source, Verdict
from turngate.harnesses.errors import Fault
from turngate.harnesses.groups import Slot
from turngate.harnesses.install import Installed
from turngate.harnesses.judging import Judges
from turngate.harnesses.patient import PatientGateway
from turngate.harnesses.sandbox import OPT, Finished, Ground, Job, Mount, Sandbox
from turngate.harnesses.settings import RunSettings
from turngate.harnesses.surely import surely
from turngate.harnesses.verify import VerifierJob, verify
from turngate.harnesses.workspace import Folders, Scratch, remove_rollout, write_home
from turngate.proxy import wire
from turngate.tasks.harbor import Task
from turngate.tasks.rewards import Reward
from turngate.tasks.steps import solution_steps

CAUSES: Mapping[str, str] = {
    "gateway_unavailable": "the gateway did not answer for longer than the runner's patience",
    "gateway_refused": "the gateway refused to open or close the session",
    "sandbox_start": "the sandbox could not be started",
    "harness_exit_N": "the agent ended with status N",
    "harness_error": "the agent reported an error of its own and ended with status 0",
    "harness_timeout": "the agent did not end before the deadline",
    "no_turns": "the agent ended without a single turn",
    "disk_limit": "the agent wrote more than its workspace may hold and was ended",
    "workspace_invalid": "what the agent left cannot be copied for the verifier",
    "verifier_start": "the verifier's sandbox could not be started",
    "verifier_timeout": "the verifier did not end in time",
    "verifier_exit": "the verifier ended with a status other than 0",
    "reward_missing": "the verifier wrote no reward",
    "reward_invalid": "the reward is not a finite number within the task's range",
    "oversampled": "cancelled: enough others of its group were scored (extra_rollouts)",
    "group_deadline": "cancelled: the time of its group was over",
    "group_closed": "the gateway had closed its group already",
    "stale": "cancelled by the gateway: its version is too old to be trained (train.max_staleness)",
    "version_retired": "cancelled by the gateway: the engine's adapter places were needed for newer versions",
    "runner_stopped": "cancelled: the runner was told to stop, or died",
    "session_idle": "the gateway closed the session after a long silence (its setting session_idle_s)",
    "runner_error": "an unexpected error of the runner itself; its text is in runner.jsonl",
}
CANCEL_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class Result:
    """How one rollout ended; a line of runner.jsonl. `detail` is for people, `notes` are the harness's.

    `retried` has the causes of earlier sessions of it that failed before their first turn.
    """

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
    retried: tuple[str, ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The line's object."""
        return asdict(self)


@dataclass(slots=True)
class Ending:
    """Why a running rollout is cancelled; whoever cancels it says so first. `replaced`: it will be run again.

    `opened`: the gateway gave it a session.
    """

    cause: str = "runner_stopped"
    replaced: bool = False
    begun: bool = False
    opened: bool = False


@dataclass(frozen=True, slots=True)
class Stage:
    """What all rollouts of a run share."""

    settings: RunSettings
    harness: Harness
    installed: Installed | None
    sandbox: Sandbox
    gateway: PatientGateway
    scratch: Scratch
    faults: Path | None = None
    run: str = ""
    judges: Judges = field(default_factory=Judges)

    def options(self, task: Task) -> HarnessOptions:
        """The agent's options on `task`: a system prompt of the settings wins over the task's own."""
        options = self.settings.harness_options
        if task.system is None or options.system_prompt is not None:
            return options
        return options.model_copy(update={"system_prompt": task.system})

    def request(self, slot: Slot) -> wire.NewRollout:
        """The session a rollout asks the gateway for; its metadata names the run and the slot."""
        s, task = self.settings, slot.task
        return wire.NewRollout(
            task=task.name,
            group=slot.group,
            group_size=s.group_size,
            group_attempts=s.group_size + s.extra_rollouts,
            group_deadline_s=s.group_deadline,
            harness=self.harness.name,
            policy=s.policy,
            pin=s.pin,
            history=s.history,
            training=s.training and s.teacher is None,
            upstream=self.upstream(task),
            trained_labels=s.trained_labels,
            main_tools=self.harness.offers_tools(s.harness_options),
            version=s.version,
            sampling={**s.sampling, "seed": seed_of(task.name, slot.index)} if s.fixed_seeds else s.sampling,
            budgets=s.budgets,
            deadline_s=s.deadline_s + task.verifier_timeout_s + 60.0,
            metadata={
                "harness_version": self.harness.version,
                "sandbox": self.sandbox.name,
                "task_digest": task.digest,
                "runner": self.run,
                "slot": slot.index,
            },
        )

    def upstream(self, task: Task) -> wire.ScriptTeacher | wire.OpenAITeacher | None:
        """Who answers instead of the policy.

        Raises:
            TaskInvalid: the oracle was asked for, and the task has no steps to play.
        """
        teacher = self.settings.teacher
        if teacher is None:
            return None
        if teacher == "oracle":
            steps, options = solution_steps(task.folder), self.settings.harness_options
            return wire.ScriptTeacher(turns=[self.harness.play(step, options) for step in steps])
        return wire.OpenAITeacher.model_validate(teacher.model_dump())


def seed_of(task: str, index: int) -> int:
    """The sampling seed of an attempt at a task: the same in every run, below 2**31."""
    return int.from_bytes(hashlib.sha256(f"{task}:{index}".encode()).digest()[:4], "big") >> 1


async def run_rollout(stage: Stage, task: Task, group: str, *, index: int = 0, ending: Ending | None = None) -> Result:
    """Attempt number `index` of `group`, from opening its session to closing it; `ending` says why it is cancelled.

    A fault before the first turn is tried again in a new session, up to `retries` times and within the deadline.
    """
    began, retried = time.monotonic(), list[str]()
    while True:
        may_retry = len(retried) < stage.settings.retries
        result, again = await _attempt(stage, Slot(task, group, index), ending or Ending(), began, may_retry)
        if not again:
            return replace(result, retried=tuple(retried), seconds=round(time.monotonic() - began, 3))
        retried.append(result.cause or "")


async def _attempt(stage: Stage, slot: Slot, ending: Ending, began: float, may_retry: bool) -> tuple[Result, bool]:
    """One session; True when it is to be tried again."""
    result = Result(None, slot.task.name, slot.group, "unscorable", None, None, "", 0.0, None, 0)
    try:
        ground = await stage.sandbox.prepare(slot.task)
        created = await _create(stage, slot, ending)
    except Fault as fault:
        return replace(result, cause=fault.cause, detail=fault.detail), False
    ending.opened = True
    result = replace(result, id=created.id, version=created.version)
    detail = ""
    try:
        closing = await _play(stage, slot.task, ground, created, began)
    except Fault as fault:
        closing, detail = wire.FinishRollout(outcome="unscorable", cause=fault.cause), fault.detail
    except Exception as error:  # noqa: BLE001 - whatever it is, the session must be closed and the run go on
        closing, detail = wire.FinishRollout(outcome="unscorable", cause="runner_error"), repr(error)
    except asyncio.CancelledError:
        await surely(close_cancelled(stage.gateway, created.id, ending))
        raise
    again = may_retry and closing.outcome != "scored" and await _before_first_turn(stage, slot.task, created.id, began)
    closing = closing.model_copy(update={"replaced": again})
    finishing = asyncio.ensure_future(stage.gateway.finish(created.id, closing))
    turns = 0
    try:
        turns = (await _see_through(finishing)).turns
    except Fault as fault:
        closing, detail, again = await _closed_otherwise(stage, created.id, fault), fault.detail, False
    ended = replace(result, outcome=closing.outcome, reward=closing.reward, cause=closing.cause, detail=detail)
    return replace(ended, turns=turns, notes=closing.metrics), again


async def _create(stage: Stage, slot: Slot, ending: Ending) -> wire.RolloutCreated:
    """Open the session; cancelled in the middle of it, the session is closed all the same."""
    creating = asyncio.ensure_future(stage.gateway.create(stage.request(slot)))
    creating.add_done_callback(_heard)
    try:
        return await asyncio.shield(creating)
    except asyncio.CancelledError:

        async def abandon() -> None:
            done, _ = await asyncio.wait({creating}, timeout=CANCEL_PATIENCE_S)
            if done and creating.exception() is None:
                await close_cancelled(stage.gateway, creating.result().id, ending)

        await surely(abandon())
        raise


def _heard(task: asyncio.Future[wire.RolloutCreated]) -> None:
    """A failure after nobody waits any more is no news."""
    if not task.cancelled():
        task.exception()


async def _see_through(finishing: asyncio.Future[wire.RolloutInfo]) -> wire.RolloutInfo:
    """The answer to a finish that was sent, also when cancelled meanwhile: what was told stays told."""
    try:
        return await asyncio.shield(finishing)
    except asyncio.CancelledError:
        done, _ = await asyncio.wait({finishing}, timeout=CANCEL_PATIENCE_S)
        if not done:
            raise
        return finishing.result()


async def _closed_otherwise(stage: Stage, rollout: str, fault: Fault) -> wire.FinishRollout:
    """How a rollout ended that the gateway would not let us finish: as it has closed it itself, if it has."""
    if fault.cause == "gateway_refused":
        with contextlib.suppress(Fault):
            told = await stage.gateway.rollout(rollout)
            if told.outcome is not None:
                return wire.FinishRollout(reward=told.reward, outcome=told.outcome, cause=told.cause)
    return wire.FinishRollout(outcome="unscorable", cause=fault.cause)


async def _before_first_turn(stage: Stage, task: Task, rollout: str, began: float) -> bool:
    """Whether the session had no turn and there is time for another."""
    if time.monotonic() - began >= _longest_s(stage, task):
        return False
    try:
        return (await stage.gateway.rollout(rollout)).turns == 0
    except Fault:
        return False


async def _play(
    stage: Stage, task: Task, ground: Ground, created: wire.RolloutCreated, began: float
) -> wire.FinishRollout:
    """Agent, then verifier; the closing words for the gateway."""
    folders = await asyncio.to_thread(stage.scratch.folders, created.id, ground.files)
    try:
        done, verdict = await _act(stage, task, ground, created, folders, began)
        if stage.faults is not None and (done.timed_out or done.exceeded or verdict.fault):
            await asyncio.to_thread(_keep_output, stage.faults, created.id, done)
        if done.exceeded:
            raise Fault(done.exceeded, f"the agent was ended after {done.seconds:.1f} s")
        if done.timed_out:
            raise Fault("harness_timeout", f"not done after {done.seconds:.1f} s")
        if verdict.fault:
            raise Fault(verdict.fault, (done.stderr or done.stdout).strip()[-500:])
        info = await stage.gateway.rollout(created.id)
        if info.turns == 0:
            raise Fault("no_turns", done.stderr.strip()[-500:])
        if task.judge is not None:
            asking = asyncio.to_thread(stage.judges.ask, task.judge, verdict.answer, task.verifier_timeout_s)
            return _scored(done, verdict, await asking)
        watched = stage.scratch.watched(folders.judged, folders.rewards)
        judged = VerifierJob(folders, verdict.answer, stage.settings.limits, ground.image, watched)
        reward = await verify(task, stage.sandbox, judged)
    finally:
        await surely(asyncio.to_thread(remove_rollout, folders.root))
    return _scored(done, verdict, reward)


def _scored(done: Finished, verdict: Verdict, reward: Reward) -> wire.FinishRollout:
    """The closing words of a rollout that has its reward."""
    metrics = {"agent_s": round(done.seconds, 3), **verdict.notes}
    if done.oom_kills:
        metrics["oom_kills"] = done.oom_kills
    return wire.FinishRollout(reward=reward.value, rewards=dict(reward.parts), metrics=metrics)


async def _act(
    stage: Stage, task: Task, ground: Ground, created: wire.RolloutCreated, folders: Folders, began: float
) -> tuple[Finished, Verdict]:
    """Run the agent to its end or the deadline."""
    settings, harness, sandbox = stage.settings, stage.harness, stage.sandbox
    options = stage.options(task)
    if isinstance(harness, InProcess):
        outside = Endpoint(created.base_url, created.api_key, settings.model or created.policy)
        return await _converse(harness, outside, task, options, _longest_s(stage, task) - (time.monotonic() - began))
    places = sandbox.places(stage.installed, folders.home, folders.workspace, task.workdir)
    endpoint = Endpoint(sandbox.gateway_url(created.base_url), created.api_key, settings.model or created.policy)
    await asyncio.to_thread(write_home, folders.home, harness.files(endpoint, options))
    address = urlsplit(created.base_url)
    if address.scheme != "http" and sandbox.isolated:
        raise Fault("gateway_refused", f"a sandbox reaches a gateway over http only, not {address.scheme}")
    job = Job(
        argv=harness.command(places, endpoint, task.prompts, options),
        env=harness.env(places, endpoint),
        mounts=[
            Mount(folders.home, places.home, writable=True),
            Mount(folders.workspace, places.workspace, writable=True),
            *_program_mounts(stage.installed, harness.source),
        ],
        home=places.home,
        workdir=places.workspace,
        deadline_s=max(0.01, _longest_s(stage, task) - (time.monotonic() - began)),
        gateway=(address.hostname or "127.0.0.1", address.port or 80),
        limits=settings.limits,
        image=ground.image,
        disk=stage.scratch.watched(folders.home, folders.workspace),
    )
    done = _without(created.api_key, await sandbox.run(job))
    return done, harness.verdict(Output(done.exit_code, done.stdout, done.stderr))


async def _converse(
    harness: InProcess, endpoint: Endpoint, task: Task, options: HarnessOptions, longest_s: float
) -> tuple[Finished, Verdict]:
    """Hold the conversation here, to its end or the deadline."""
    began = time.monotonic()
    try:
        async with asyncio.timeout(max(0.01, longest_s)):
            output = await harness.converse(endpoint, task.prompts, options)
    except TimeoutError:
        return Finished(-1, "", "", True, time.monotonic() - began), Verdict("")
    done = Finished(output.exit_code, output.stdout, output.stderr, False, time.monotonic() - began)
    return done, harness.verdict(output)


def _program_mounts(installed: Installed | None, source: Source) -> list[Mount]:
    """What the agent is made of, read-only; a Python outside /usr is shown where it is, because it cannot be moved."""
    if installed is None:
        return []
    mounts = [Mount(installed.package, OPT / "harness"), Mount(installed.node, OPT / "node")]
    prefix = installed.python.parents[1]
    own_python = source == "pypi" and not prefix.is_relative_to("/usr")
    return [*mounts, Mount(prefix, PurePosixPath(prefix))] if own_python else mounts


async def close_cancelled(gateway: PatientGateway, rollout: str, ending: Ending) -> bool:
    """Tell the gateway, but do not wait long: the run is ending. Whether it heard."""
    closing = wire.FinishRollout(outcome="cancelled", cause=ending.cause, replaced=ending.replaced)
    try:
        await asyncio.wait_for(gateway.finish(rollout, closing), CANCEL_PATIENCE_S)
    except (Fault, TimeoutError):
        return False
    return True


def _longest_s(stage: Stage, task: Task) -> float:
    return min(stage.settings.deadline_s, task.agent_timeout_s or stage.settings.deadline_s)


def _without(secret: str, done: Finished) -> Finished:
    """What an agent printed, without its session's secret: it is kept, and told to people."""
    out, err = (text.replace(secret, "tg-…") for text in (done.stdout, done.stderr))
    return replace(done, stdout=out, stderr=err)


def _keep_output(folder: Path, rollout: str, done: Finished) -> None:
    """Keep what a failed agent printed, for people."""
    folder.mkdir(parents=True, exist_ok=True)
    head = f"exit {done.exit_code}, timed out {done.timed_out}, {done.seconds:.1f} s\n"
    (folder / f"{rollout}.log").write_text(f"{head}--- stdout\n{done.stdout}\n--- stderr\n{done.stderr}\n")
