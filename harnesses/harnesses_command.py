"""`turngate harnesses`: which agents there are and whether they are installed; `install NAME` fetches one.

Listing never fetches anything; installing is what the first run would do, done beforehand.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from turngate.harnesses.base import Harness
from turngate.harnesses.errors import HarnessesError, UnknownHarness
from turngate.harnesses.install import cache_dir, install, install_state
from turngate.harnesses.registry import get_harness, list_harnesses
from turngate.proxy.arguments import Parser

OK, FAILED, USAGE = 0, 1, 2

DESCRIPTION = """\
Without arguments: the agents that `harness=NAME` can name, each at its pinned version, and whether it is installed.

`install NAME...` fetches agents into $TURNGATE_CACHE (default ~/.cache/turngate) from npm or PyPI, checked against a
committed lock. Interrupted, it leaves nothing that counts; run it again. Afterwards no network is needed.
"""


def harnesses_command(argv: Sequence[str]) -> int:
    """List or install; the exit status (0 ok, 1 failed, 2 usage)."""
    options = _parser().parse_args(list(argv))
    try:
        if options.action == "install":
            for harness in [get_harness(name) for name in options.names]:
                _install(harness)
            return OK
    except HarnessesError as error:
        print(f"turngate harnesses: {error}", file=sys.stderr)
        return USAGE if isinstance(error, UnknownHarness) else FAILED
    found = [
        {
            "name": harness.name,
            "version": harness.version,
            "dialect": harness.dialect,
            "source": harness.source,
            "package": harness.package,
            "state": install_state(harness),
        }
        for harness in list_harnesses()
    ]
    print(json.dumps(found, indent=2) if options.json else _table(found))
    return OK


def _install(harness: Harness) -> None:
    state = install_state(harness)
    if state in ("absent", "outdated"):
        print(f"{harness.name} {harness.version}: installing into {cache_dir()} ...", file=sys.stderr)
        install(harness)
        state = install_state(harness)
    print(f"{harness.name} {harness.version}: {state}")


def _table(found: Sequence[dict[str, str]]) -> str:
    columns = ("name", "version", "dialect", "source", "state")
    lines = [dict(zip(columns, columns, strict=True)), *found]
    width = {column: max(len(line[column]) for line in lines) for column in columns}
    return "\n".join("  ".join(f"{line[column]:{width[column]}}" for column in columns).rstrip() for line in lines)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="turngate harnesses", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    actions = parser.add_subparsers(dest="action", metavar="install")
    fetch = actions.add_parser("install", help="fetch agents")
    fetch.add_argument("names", nargs="+", metavar="NAME", help="an agent of the list")
    return parser
