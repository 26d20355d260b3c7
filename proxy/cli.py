"""The `turngate` command: a table of sub-commands, each resolved only when it is asked for.

Lazy, because the gateway alone installs without torch: `turngate proxy` must start where `turngate train` cannot. It
must never import one command's module for another or for `--help`, and never hide which extra a package belongs to.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130

PITCH = "The gateway between agents that own their loop and the vLLM servers that run the policy being trained."


@dataclass(frozen=True)
class Command:
    """One sub-command: where its function stands, which extra its packages come from, and a line of help."""

    module: str
    function: str
    extra: str | None
    summary: str


COMMANDS: dict[str, Command] = {
    "proxy": Command(
        "turngate.proxy.serve",
        "proxy_command",
        None,
        "serve the gateway: agents in front, vLLM behind, turns kept",
    ),
    "run": Command(
        "turngate.harnesses.run", "run_command", "run", "run agents on tasks without training; solve rate with interval"
    ),
    "reap": Command(
        "turngate.harnesses.reap", "reap_command", "run", "remove what killed runs left: folders, cgroups, containers"
    ),
    "harnesses": Command(
        "turngate.harnesses.harnesses_command", "harnesses_command", "run", "the agents there are; install one"
    ),
    "tasks": Command(
        "turngate.harnesses.tasks_command", "tasks_command", "run", "check tasks, run their solutions (check, oracle)"
    ),
    "tasks stats": Command(
        "turngate.proxy.task_stats", "stats_command", None, "attempts, solve rates and failures by task, from a store"
    ),
    "train": Command(
        "turngate.trainer.train", "train_command", "train", "train LoRA adapters on groups leased from a gateway"
    ),
    "sft": Command(
        "turngate.trainer.sft", "sft_command", "train", "fine-tune an adapter on demonstrations or own successes"
    ),
    "eval": Command(
        "turngate.trainer.evaluator", "eval_command", "train", "evaluate a policy on held-out tasks while it is trained"
    ),
    "launch": Command(
        "turngate.trainer.supervise", "launch_command", "train", "the whole loop as one job from one YAML file"
    ),
    "verify": Command(
        "turngate.proxy.verify", "verify_command", None, "prove that a store's rows are the tokens that were sampled"
    ),
    "lineage": Command(
        "turngate.proxy.lineage", "lineage_command", None, "what became of each group, checked with the last checkpoint"
    ),
    "export": Command(
        "turngate.proxy.store.export", "export_command", "export", "write a store as JSONL or Parquet for `datasets`"
    ),
    "prune": Command(
        "turngate.proxy.store.prune_command", "prune_command", None, "free space: take finished work out of a store"
    ),
    "doctor": Command(
        "turngate.proxy.doctor", "doctor_command", None, "say what works on this machine, and what to do"
    ),
    "view": Command(
        "turngate.proxy.viewer.serve", "view_command", None, "browse recorded rollouts: turns, messages, tokens"
    ),
}

PARTS = {"install": "harnesses install", "check": "tasks check", "oracle": "tasks oracle", "stats": "tasks stats"}
"""Words that are no commands by themselves -> the command they are part of."""

EXAMPLES = (
    ("turngate proxy --engine http://127.0.0.1:8000 --store store", "put the gateway in front of a vLLM server"),
    ("turngate launch examples/demo.yaml train.steps=6", "engine, gateway, agents and trainer in one job"),
    ("turngate verify runs/demo/store", "check every recorded row"),
    ("turngate view runs/demo", "look at what was recorded"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 ok, 1 failed, 2 wrong usage, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        _print_help(to_stderr=True)
        return USAGE
    words = 2 if " ".join(arguments[:2]) in COMMANDS else 1
    name, rest = " ".join(arguments[:words]), arguments[words:]
    if name in ("-h", "--help", "help"):
        _print_help()
        return OK
    if name in ("-V", "--version"):
        print(f"turngate {_version()}")
        return OK
    command = COMMANDS.get(name)
    if command is None:
        _complain(f"no command {name!r}{_suggestion(name)}; `turngate --help` lists them")
        return USAGE
    return _run(name, command, rest)


def resolve(command: Command) -> Callable[[list[str]], int]:
    """The function behind a command; raises ModuleNotFoundError when a package of its extra is not installed."""
    function: Callable[[list[str]], int] = getattr(importlib.import_module(command.module), command.function)
    return function


def _run(name: str, command: Command, arguments: list[str]) -> int:
    try:
        return resolve(command)(arguments)
    except KeyboardInterrupt:
        _complain("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) went away: not a failure; keep the interpreter's own flush at exit quiet too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except SystemExit as leaving:  # argparse leaves this way
        return _status(leaving)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if command.extra is None or package in ("", "turngate"):
            raise
        _complain(f"`turngate {name}` needs the package {package!r}: pip install 'turngate[{command.extra}]'")
        return FAILED


def _status(leaving: SystemExit) -> int:
    if leaving.code is None:
        return OK
    if isinstance(leaving.code, int):
        return leaving.code
    _complain(str(leaving.code))
    return FAILED


def _suggestion(name: str) -> str:
    import difflib

    close = [PARTS[name]] if name in PARTS else difflib.get_close_matches(name, COMMANDS, n=1)
    return f", did you mean `turngate {close[0]}`?" if close else ""


def _version() -> str:
    try:
        return importlib.metadata.version("turngate")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _complain(message: str) -> None:
    print(f"turngate: {message}", file=sys.stderr)


def _print_help(*, to_stderr: bool = False) -> None:
    from rich.console import Console

    console = Console(stderr=to_stderr, highlight=False)
    console.print(f"[bold]turngate[/bold] {_version()}  {PITCH}\n")
    console.print(
        "[bold]usage:[/bold] turngate COMMAND [ARGUMENTS]     [dim]each COMMAND --help is worth reading[/dim]\n"
    )
    console.print(_columns([(name, command.summary) for name, command in COMMANDS.items()]))
    console.print("\n[bold]for example[/bold]")
    console.print(_columns(EXAMPLES))
    console.print("\nexit status: 0 ok, 1 failed, 2 wrong usage, 130 interrupted")


def _columns(rows: Iterable[tuple[str, str]]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    for left, right in rows:
        table.add_row(f"  [cyan]{escape(left)}[/cyan]", escape(right))
    return table


if __name__ == "__main__":
    sys.exit(main())
