"""All attempts of an evaluation: every task so many times at fixed seeds, on one adapter version, never trained.

The runner does the work, so an evaluation that was interrupted goes on where it was. It counts nothing and judges
nothing: rows in, rows out; what they amount to is the caller's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from turngate.harnesses.errors import HarnessesError
from turngate.harnesses.install import install
from turngate.harnesses.journal import Journal
from turngate.harnesses.patient import PatientGateway
from turngate.harnesses.preflight import check_run, needs_sandbox
from turngate.harnesses.rollout import Result, Stage
from turngate.harnesses.run import make_plan, make_sandbox
from turngate.harnesses.runner import Runner
from turngate.harnesses.settings import RunSettings
from turngate.harnesses.workspace import Scratch
from turngate.proxy import wire
from turngate.proxy.client import GatewayClient
from turngate.tasks.harbor import Task


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt and what its answers were like; `answers` is None where it had no session."""

    result: Result
    answers: wire.Answers | None


def load_sets(settings: RunSettings, specs: Sequence[str]) -> tuple[list[Task], dict[str, str]]:
    """The tasks of several sets, and which set each name came from; a task in two sets counts for the first.

    Raises:
        HarnessesError, TasksError: a set, the harness or its options are wrong.
    """
    tasks, origin = list[Task](), dict[str, str]()
    for spec in specs:
        for task in check_run(settings.model_copy(update={"tasks": spec}))[1]:
            if task.name not in origin:
                origin[task.name] = spec
                tasks.append(task)
    return tasks, origin


async def attempt_all(
    settings: RunSettings,
    tasks: Sequence[Task],
    client: GatewayClient,
    *,
    on_runner: Callable[[Runner], None] = lambda runner: None,
) -> list[Attempt]:
    """`settings.group_size` attempts at each task, once. `on_runner` gets the runner, to cancel it.

    Raises:
        HarnessesError: the sandbox does not work here, another runner holds `settings.out`, or the gateway is gone or
            refuses everything.
    """
    alone = {"training": False, "epochs": 1, "groups": None, "fixed_seeds": True, "batch_groups": None}
    settings = settings.model_copy(update=alone)
    harness, _ = await asyncio.to_thread(check_run, settings)
    installed = await asyncio.to_thread(install, harness)
    with ExitStack() as stack:
        journal = stack.enter_context(Journal(settings.out))
        scratch = stack.enter_context(Scratch(settings.scratch, settings.limits))
        sandbox = make_sandbox(settings, scratch)
        stack.callback(sandbox.close)
        if needs_sandbox(harness, tasks):
            sandbox.check()
        gateway = PatientGateway(client, settings.gateway_patience_s)
        faults = settings.out / "faults" if settings.out is not None else None
        stage = Stage(settings, harness, installed, sandbox, gateway, scratch, faults, journal.run)
        stack.callback(stage.judges.close)
        runner = Runner(stage, make_plan(settings, tasks), journal=journal)
        on_runner(runner)
        results = await runner.run()
        if runner.why_ended:
            raise HarnessesError(runner.why_ended)
    found = await asyncio.to_thread(_answers, client, [result.id for result in results if result.id is not None])
    return [Attempt(result, found.get(result.id or "")) for result in results]


def _answers(client: GatewayClient, rollouts: Sequence[str]) -> Mapping[str, wire.Answers]:
    return {rollout: client.answers(rollout) for rollout in rollouts}
