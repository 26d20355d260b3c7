"""`turngate doctor`: what works here and what does not, each with what to do about it.

Each package looks after its own checks, found by name as commands are, so that the gateway alone can be examined where
nothing else is installed. A check only looks: whatever it makes (a file, a loaded adapter, a namespace) it removes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from turngate.proxy.arguments import Parser

OK, FAILED = 0, 1

CHECKS = (
    ("turngate.proxy.doctor_checks", None),
    ("turngate.proxy.doctor_engine", None),
    ("turngate.harnesses.doctor_checks", "run"),
    ("turngate.trainer.doctor_checks", "train"),
)
"""Modules with `checks(options)`, which yields `(status, what, words, todo)`, and the extra their packages are in."""

Line = tuple[str, str, str, str]

HELP = """\
Look at this machine and say what works: engine, log-probs, adapters, store, ports, sandbox, harnesses, versions.

Each line is ok, warn or fail, with what to do about it. Nothing is changed or left behind."""

EXAMPLES = """\
examples:
  turngate doctor
  turngate doctor --engine http://127.0.0.1:8000 --store runs/try/store
  turngate doctor --engine http://127.0.0.1:8000 --adapter runs/demo/adapters/v1
  turngate doctor --json | jq '.checks[] | select(.status != "ok")'

exit status: 0 nothing fails (warnings may be there), 1 something does, 2 wrong usage"""


def doctor_command(argv: Sequence[str]) -> int:
    """The `turngate doctor` command; returns its exit status."""
    options = vars(_parser().parse_args(argv))
    as_json = options.pop("json")
    lines = []
    for line in diagnose(options):
        lines.append(line)
        if not as_json:
            _show(*line)
    counts = Counter(status for status, *_ in lines)
    if as_json:
        keys = ("status", "check", "found", "todo")
        found = [dict(zip(keys, line, strict=True)) for line in lines]
        print(json.dumps({"ok": not counts["fail"], "checks": found}))
    else:
        print(f"{counts['ok']} ok, {counts['warn']} warnings, {counts['fail']} failures")
    return FAILED if counts["fail"] else OK


def diagnose(options: dict[str, Any]) -> Iterator[Line]:
    """Every check's lines; a package that is not installed is a warning that names its extra."""
    for name, extra in CHECKS:
        try:
            yield from importlib.import_module(name).checks(options)
        except ModuleNotFoundError as error:
            if extra is None:
                raise
            words = f"the package {error.name!r} is not installed, so this part was not looked at"
            yield "warn", name.split(".")[1], words, f"pip install 'turngate[{extra}]' if you need it"


def _show(status: str, what: str, words: str, todo: str) -> None:
    from rich.console import Console
    from rich.markup import escape

    colour = {"ok": "green", "warn": "yellow", "fail": "bold red"}[status]
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    console.print(f"[{colour}]{status:4}[/{colour}]  {what:14} {escape(words)}")
    if todo:
        console.print(f"      {'':14} [dim]->[/dim] {escape(todo)}")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="turngate doctor",
        description=HELP,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--engine", dest="engines", action="append", default=[], metavar="URL", help="a vLLM server; may be repeated"
    )
    parser.add_argument("--render", metavar="URL", help="a `vllm launch render` server; default: each engine")
    parser.add_argument("--adapter", type=Path, metavar="DIR", help="a LoRA to load on each engine and unload again")
    parser.add_argument("--store", type=Path, default=Path("."), metavar="DIR", help="where the store is or will be")
    parser.add_argument("--host", default="127.0.0.1", help="address the gateway is to listen on")
    parser.add_argument("--port", type=int, default=8400, help="port the gateway is to listen on (default: 8400)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    return parser
