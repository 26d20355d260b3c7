"""`turngate tasks`: are these tasks sound, and do their own solutions earn the full reward?

`check` only reads; `oracle` runs solutions in the sandbox. Every problem names the file, the key and the fix, and the
exit status says whether there was any.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from turngate.harnesses.errors import HarnessesError
from turngate.harnesses.oracle import Played, play_all
from turngate.harnesses.run import make_sandbox, say_images
from turngate.harnesses.settings import RunSettings
from turngate.harnesses.workspace import Scratch
from turngate.proxy.arguments import Parser
from turngate.tasks.dataset import DatasetOptions, is_dataset, load_rows
from turngate.tasks.errors import NoSuchTasks, TaskInvalid, TasksError
from turngate.tasks.harbor import Task, load_task, load_tasks, task_folders
from turngate.tasks.steps import STEPS_FILE, solution_steps

OK, FAILED, USAGE = 0, 1, 2

DESCRIPTION = """\
check PATH    load every task at PATH (Harbor directories, or a dataset) and print what is wrong with it
oracle PATH   run every task's solution/solve.sh in the sandbox, then its verifier: it must earn the full reward
stats STORE   attempts, solve rate with interval and causes of failure by task, from a gateway's store

exit status: 0 all are fine, 1 some are not, 2 wrong usage
"""


def tasks_command(argv: Sequence[str]) -> int:
    """Check tasks or run their oracles; the exit status."""
    parser = _parser()
    options = parser.parse_args(list(argv))
    if options.action == "stats":  # a command of its own, in the gateway: it needs a store and no agents
        parser.error("write it as turngate tasks stats STORE")
    try:
        return _check(options) if options.action == "check" else _oracle(options)
    except (HarnessesError, TasksError) as error:
        print(f"turngate tasks: {error}", file=sys.stderr)
        return USAGE if isinstance(error, NoSuchTasks) else FAILED


def _check(options: argparse.Namespace) -> int:
    where = options.path
    if is_dataset(where):
        rows = load_rows(where, DatasetOptions(prompt_column=options.prompt_column, split=options.split))
        print(f"{len(rows)} rows are fine")
        return OK
    folders, problems = task_folders(Path(where)), list[str]()
    if not folders:
        load_tasks(Path(where))  # says what was looked for
    for folder in folders:
        try:
            task = load_task(folder)
            script = task.folder / "solution" / "solve.sh"
            if not script.is_file():
                print(f"{script}: missing; nothing shows that it can be solved")
            if script.is_file() or (task.folder / STEPS_FILE).exists():
                solution_steps(task.folder)
        except TasksError as error:
            problems.append(str(error))
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{len(folders) - len(problems)} of {len(folders)} tasks are fine")
    return FAILED if problems else OK


def _oracle(options: argparse.Namespace) -> int:
    if is_dataset(options.path):
        raise TaskInvalid(f"{options.path}: rows of a dataset have no solutions to run; `check` reads them")
    tasks = load_tasks(Path(options.path))[: options.limit]
    say_images(RunSettings(sandbox=options.sandbox), tasks, "turngate tasks")
    played = asyncio.run(_play(tasks, options))
    for one in played:
        if one.problem:
            print(one.problem, file=sys.stderr)
    good = sum(not one.problem for one in played)
    print(f"{good} of {len(played)} solutions earn the full reward")
    return OK if good == len(played) else FAILED


async def _play(tasks: Sequence[Task], options: argparse.Namespace) -> list[Played]:
    settings = RunSettings(sandbox=options.sandbox)
    with Scratch(None, settings.limits) as scratch:
        sandbox = make_sandbox(settings, scratch)
        try:
            sandbox.check()
            return await play_all(tasks, sandbox, scratch, settings.limits, options.at_once)
        finally:
            sandbox.close()


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="turngate tasks", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="check|oracle|stats")
    check = actions.add_parser("check", help="load every task and print what is wrong")
    oracle = actions.add_parser("oracle", help="run every solution; expects the full reward")
    actions.add_parser("stats", help="attempts and solve rate by task, from a store")
    for action in (check, oracle):
        action.add_argument(
            "path", help="a task directory, a folder of them, or the name of a set (words, dataops:train)"
        )
    check.add_argument("--prompt-column", default="prompt", metavar="NAME", help="of a dataset (prompt)")
    check.add_argument("--split", default="train", metavar="NAME", help="of a dataset (train)")
    oracle.add_argument("--limit", type=_positive, metavar="N", help="only the first N tasks")
    oracle.add_argument("--at-once", type=_positive, default=4, metavar="N", help="solutions running at once (4)")
    oracle.add_argument("--sandbox", choices=("bubblewrap", "docker", "process"), default="bubblewrap")
    return parser


def _positive(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)
