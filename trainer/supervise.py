"""`turngate launch`: engine, gateway, runner and trainer as one job, from one file, in one folder.

It starts the parts in order, shows what they do, ends them in order, checks the store and prints a summary. It must
never leave a process behind, end with status 0 when a part failed, or keep the reason to itself.
"""

from __future__ import annotations

import argparse
import datetime
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from turngate.harnesses.errors import HarnessesError
from turngate.harnesses.preflight import check_run
from turngate.proxy.arguments import Parser
from turngate.tasks.errors import TasksError
from turngate.trainer.errors import TrainerError
from turngate.trainer.job import Job
from turngate.trainer.launch_config import LaunchConfig, dump, load
from turngate.trainer.models import check_name
from turngate.trainer.progress import Display
from turngate.trainer.run_folder import RunFolder
from turngate.trainer.warm_start import demonstration_settings

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130

HELP = """\
Run the whole loop as one job: a vLLM engine, the gateway in front of it, agents working on tasks, and the trainer that
turns their rollouts into LoRA adapter versions. The job ends when the trainer has made its steps.

A run is one folder, OUT/NAME-TIME: config.yaml (everything resolved), logs/, store/, checkpoints/, adapters/,
metrics.jsonl, run.json. The last line printed is a summary as JSON.
"""
EXAMPLES = """\
examples:
  turngate launch examples/demo.yaml                          the demo: small model, real agents, CPU
  turngate launch examples/demo.yaml train.steps=20 name=long any key of the file can be set here
  turngate launch --resume demo-20260901-120000               go on with an earlier run, from its last checkpoint
  turngate launch examples/demo.yaml --check                  only print the resolved configuration

Ctrl-C stops gracefully, a second one at once; neither leaves a process behind, nor does a SIGKILL of this one.
exit status: 0 ok, 1 a part failed (its last log lines are shown), 2 wrong usage, 130 interrupted
"""


def launch_command(argv: list[str]) -> int:
    """Run `turngate launch`; returns the exit status."""
    options = _parser().parse_intermixed_args(argv)
    words: list[str] = options.words
    files = [word for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    try:
        config, folder = _prepare(files, overrides, options.resume, options.out, check=options.check)
    except TrainerError as error:
        print(f"turngate launch: {error}", file=sys.stderr)
        return USAGE
    if folder is None:
        print(dump(config), end="")
        return OK
    return _run(config, folder, resumed=options.resume is not None)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="turngate launch",
        usage="turngate launch CONFIG [key=value ...] | turngate launch --resume RUN [key=value ...]",
        description=HELP,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="*", metavar="CONFIG key=value", help="the YAML file, then settings over it")
    parser.add_argument("--resume", metavar="RUN", help="folder or id of an earlier run to go on with")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="where --resume looks for an id (runs)")
    parser.add_argument("--check", action="store_true", help="print the resolved configuration and stop")
    return parser


def _prepare(
    files: list[str], overrides: list[str], resume: str | None, out: Path, *, check: bool
) -> tuple[LaunchConfig, RunFolder | None]:
    if resume is None:
        if len(files) != 1:
            raise TrainerError(
                f"name one configuration file (got {files or 'none'}); `turngate launch --help` has examples"
            )
        config = load(Path(files[0]), overrides)
        _check_run(config)
        if check:
            return config, None
        folder = RunFolder.new(config.out, config.name, datetime.datetime.now(datetime.UTC))
    else:
        if files:
            raise TrainerError(f"--resume takes its configuration from the run; leave out {files[0]}")
        folder = RunFolder.existing(out, resume)
        config = load(folder.config, overrides)
        _check_run(config)
        if check:
            folder.close()
            return config, None
    folder.config.write_text(dump(config), encoding="utf-8")
    return config, folder


def _check_run(config: LaunchConfig) -> None:
    """Model's name, tasks, harness and options, before an engine is started for nothing.

    Raises:
        TrainerError: something about them is wrong.
    """
    check_name(config.model)
    try:
        check_run(config.run)
        if config.warm_start is not None and config.warm_start.demonstrations is not None:
            check_run(demonstration_settings(config.run, config.warm_start.demonstrations, Path()))
    except (HarnessesError, TasksError) as error:
        raise TrainerError(str(error)) from error


def _run(config: LaunchConfig, folder: RunFolder, *, resumed: bool) -> int:
    with _stop_signals(), Display(folder.id) as display:
        display.say(f"run {folder.id} in {folder.path}" + (" (resumed)" if resumed else ""))
        try:
            return Job(config, folder, display).run()
        except KeyboardInterrupt:
            folder.update(state="interrupted")
            display.stop()
            print(f"turngate launch: interrupted; go on with: turngate launch --resume {folder.path}", file=sys.stderr)
            return INTERRUPTED
        except TrainerError as error:
            folder.update(state="failed", cause=str(error))
            display.stop()
            print(f"turngate launch: {error}", file=sys.stderr)
            return FAILED
        finally:
            folder.close()


@contextmanager
def _stop_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP (a closed terminal, a cancelled job) stop the run the way Ctrl-C does."""

    def interrupt(number: int, _: object) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
