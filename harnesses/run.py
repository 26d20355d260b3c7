"""`turngate run`: rollouts without training, against a gateway that is already there.

Prints the solve rate with its interval and every failure by cause. The launcher starts the same command with the
`run:` section of its own file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from turngate.harnesses.bubblewrap import Bubblewrap
from turngate.harnesses.cgroups import Cgroups
from turngate.harnesses.errors import HarnessesError, LimitsUnenforced, SettingsWrong, UnknownHarness
from turngate.harnesses.groups import Plan
from turngate.harnesses.install import install
from turngate.harnesses.journal import Journal
from turngate.harnesses.patient import PatientGateway
from turngate.harnesses.preflight import check_run, needs_sandbox
from turngate.harnesses.process import PlainProcess
from turngate.harnesses.registry import list_harnesses
from turngate.harnesses.rollout import Result, Stage
from turngate.harnesses.runner import Runner
from turngate.harnesses.sandbox import Sandbox
from turngate.harnesses.setting_errors import apply_override, explain
from turngate.harnesses.setting_files import read_mapping
from turngate.harnesses.settings import RunSettings
from turngate.harnesses.summary import Summary, as_text, summarise
from turngate.harnesses.workspace import Scratch
from turngate.proxy.arguments import Parser
from turngate.proxy.client import GatewayClient
from turngate.proxy.ids import uuid7
from turngate.tasks.errors import NoSuchTasks, TasksError
from turngate.tasks.harbor import Task

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130

DESCRIPTION = """\
Run agents on tasks without training, against a running gateway.

Prints the solve rate with its 95 % interval (Wilson), rewards by task, and every failure by cause. A rollout that
failed for a reason of the sandbox, the agent or the verifier is counted by its cause and stands outside the rate.
"""
EPILOG = """

examples:
  turngate run tasks=tasks/words harness=pi groups=16 admin_key_file=runs/try/store/admin.key
  turngate run --config examples/demo.yaml groups=4 admin_key_file=runs/try/store/admin.key --json
  turngate run tasks=tasks/words training=false group_size=1 epochs=1      a plain evaluation, one rollout a task

Ctrl-C ends what is in flight and closes its sessions, a second one leaves at once; neither leaves a process behind.
exit status: 0 ok, 1 failed, 2 wrong usage, 130 interrupted
"""


def run_command(argv: Sequence[str]) -> int:
    """Run agents on tasks as told on the command line; the exit status (0 ok, 1 failed, 2 usage, 130 interrupted)."""
    parser = _parser()
    try:
        options = parser.parse_args(list(argv))
    except SystemExit as stop:
        return int(stop.code or 0)
    try:
        settings = read_settings(options.config, options.overrides)
        if options.list:
            print("\n".join(f"{h.name}  {h.package} {h.version}  ({h.dialect})" for h in list_harnesses()))
            return OK
        admin_key = settings.admin_key()
    except (ValueError, OSError) as error:
        print(f"turngate run: {error}", file=sys.stderr)
        return USAGE
    try:
        return asyncio.run(run_agents(settings, admin_key, as_json=options.json))
    except (HarnessesError, TasksError) as error:
        print(f"turngate run: {error}", file=sys.stderr)
        return USAGE if isinstance(error, UnknownHarness | SettingsWrong | NoSuchTasks) else FAILED


def read_settings(config: Path | None, overrides: Sequence[str]) -> RunSettings:
    """Settings from a YAML file (its `run:` section if it has one), then `key=value` overrides, dotted for nested keys.

    Raises:
        ValueError: the file cannot be read; or a key is unknown or a value is wrong: a line for each, with the key that
            was meant.
    """
    values: dict[str, Any] = {} if config is None else read_mapping(config, "run")
    for override in overrides:
        apply_override(values, override)
    try:
        return RunSettings.model_validate(values)
    except ValidationError as error:
        raise ValueError(explain(error, RunSettings, file=config, overrides=overrides)) from None


async def run_agents(settings: RunSettings, admin_key: str, *, as_json: bool) -> int:
    """One run to its end; prints progress on stderr and the summary on stdout."""
    harness, tasks = await asyncio.to_thread(check_run, settings)
    installed = await asyncio.to_thread(install, harness)
    with ExitStack() as stack:
        journal = stack.enter_context(Journal(settings.out))
        client = stack.enter_context(GatewayClient(settings.gateway, admin_key))
        scratch = stack.enter_context(Scratch(settings.scratch, settings.limits))
        sandbox = make_sandbox(settings, scratch)
        stack.callback(sandbox.close)
        if needs_sandbox(harness, tasks):
            sandbox.check()
            say_limits(settings, [*sandbox.unenforced(settings.limits), *scratch.unenforced()])
            say_images(settings, tasks)
        gateway = PatientGateway(client, settings.gateway_patience_s)
        faults = settings.out / "faults" if settings.out is not None else None
        stage = Stage(settings, harness, installed, sandbox, gateway, scratch, faults, journal.run)
        stack.callback(stage.judges.close)
        runner = Runner(stage, make_plan(settings, tasks), journal=journal, on_result=_say)
        _handle_signals(runner)
        results = await runner.run()
    summary = summarise(results, settings.solved_at)
    print(json.dumps(summary.as_json()) if as_json else as_text(summary))
    return _status(runner, summary)


def make_sandbox(settings: RunSettings, scratch: Scratch) -> Sandbox:
    """The sandbox the settings name, with the cgroups this user may make."""
    if settings.sandbox == "docker":
        from turngate.harnesses.container import Docker  # its SDK is an extra

        network = settings.docker_build_network
        return Docker(scratch.root / "docker", host=settings.docker_host, image=settings.docker_image, network=network)
    return Bubblewrap(Cgroups.find()) if settings.sandbox == "bubblewrap" else PlainProcess(Cgroups.find())


def say_limits(settings: RunSettings, unenforced: Sequence[str]) -> None:
    """Print what cannot be held here, once.

    Raises:
        LimitsUnenforced: there is something, and `limits.strict` is set.
    """
    if unenforced and settings.limits.strict:
        raise LimitsUnenforced("limits are strict, and these cannot be held here:\n  " + "\n  ".join(unenforced))
    for line in unenforced:
        print(f"turngate run: not enforced here: {line}", file=sys.stderr)


def say_images(settings: RunSettings, tasks: Sequence[Task], who: str = "turngate run") -> None:
    """Say which tasks describe an image that the chosen sandbox does not build."""
    with_image = [task.name for task in tasks if (task.environment / "Dockerfile").is_file()]
    if with_image and settings.sandbox != "docker":
        print(
            f"{who}: {len(with_image)} of {len(tasks)} tasks have environment/Dockerfile ({with_image[0]}, …); "
            f"the sandbox {settings.sandbox} does not build it, their agents see this machine's /usr and the files "
            "beside it. With sandbox=docker it is built.",
            file=sys.stderr,
        )


def make_plan(settings: RunSettings, tasks: Sequence[Task]) -> Plan:
    """The order of groups; an unlimited run without `groups` and `epochs` goes on until it is stopped."""
    return Plan(
        tasks,
        group_size=settings.group_size,
        groups=settings.groups,
        epochs=settings.epochs,
        seed=settings.seed,
        extra=settings.extra_rollouts,
        name_group=lambda task: f"{task.name}:{uuid7(time.time_ns())}",
    )


def _handle_signals(runner: Runner) -> None:
    """First Ctrl-C or SIGTERM: end what is in flight and close its sessions. Second: leave at once.

    Leaving at once still leaves nothing behind: every sandbox dies with its runner.
    """
    seen = 0

    def on_signal() -> None:
        nonlocal seen
        seen += 1
        if seen > 1:
            os._exit(INTERRUPTED)
        print("turngate run: ending; once more to leave at once", file=sys.stderr)
        runner.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)


def _say(result: Result) -> None:
    """One line of progress on stderr."""
    what = f"reward {result.reward:.3f}" if result.reward is not None else f"{result.outcome}: {result.cause}"
    print(f"{result.task}  {what}  {result.turns} turns  {result.seconds:.1f} s", file=sys.stderr)


def _status(runner: Runner, summary: Summary) -> int:
    if runner.cancelled:
        return INTERRUPTED
    if runner.why_ended:
        print(f"turngate run: {runner.why_ended}", file=sys.stderr)
        return FAILED
    return OK if summary.scored or not summary.rollouts else FAILED


def _parser() -> argparse.ArgumentParser:
    lines = [f"  {name}: {field.description}{_default(field)}" for name, field in RunSettings.model_fields.items()]
    parser = Parser(
        prog="turngate run",
        description=DESCRIPTION,
        epilog="settings (key=value, in the file or here):\n" + "\n".join(lines) + EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, e.g. tasks=tasks/words groups=16")
    parser.add_argument("--config", type=Path, help="YAML file with settings, or with a run: section")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")
    parser.add_argument("--list", action="store_true", help="list the agents there are and leave")
    return parser


def _default(field: FieldInfo) -> str:
    """What a setting may be and is, where its description does not say."""
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    text = f"; {' or '.join(choices)}" if choices else ""
    plain = isinstance(field.default, str | int | float) and "default:" not in (field.description or "")
    return f"{text} ({field.default})" if plain else text
