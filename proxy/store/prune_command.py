"""`turngate prune`: free space in a store by taking out finished work that nothing can train any more.

It says what it would take with `--dry-run`, and refuses while a gateway runs on the store.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from turngate.proxy.arguments import Parser
from turngate.proxy.store.errors import StoreError, StoreMissing
from turngate.proxy.store.prune import STATES, Choice, Pruned, Pruner

OK, FAILED, USAGE = 0, 1, 2
DEFAULT_STATES = tuple(state for state in STATES if state != "trained")
_TIMES_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_SIZES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}

HELP = """\
Take finished rollouts out of a store, whole groups at a time, and give the space back to the disk.

Always kept: open rollouts; groups that are open, ready or leased; groups acknowledged by a trainer before a checkpoint
that contains them is durable. Kept unless named with --state: groups that were trained. After a prune training cannot
resume from an earlier checkpoint than the last with the groups that are gone, and counts are of what is left."""

EXAMPLES = """\
examples:
  turngate prune runs/demo --older-than 7d --dry-run
  turngate prune runs/demo --state dropped --state unscorable --state cancelled
  turngate prune runs/demo --max-size 20GB
  turngate prune runs/demo --state trained --older-than 4w

The gateway of the store must not be running. A vacuum needs as much free space as is left in the store.
exit status: 0 done, 1 failed (a gateway is running, the disk is full), 2 no such store or wrong usage"""


def prune_command(argv: Sequence[str]) -> int:
    """The `turngate prune` command; returns its exit status."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.older_than is None and options.max_size is None and not options.state:
        parser.error("say what to take out: --older-than, --max-size or --state")
    before_ns = None if options.older_than is None else time.time_ns() - round(options.older_than * 1e9)
    choice = Choice(frozenset(options.state or DEFAULT_STATES), before_ns, options.max_size)
    try:
        with Pruner(options.store) as pruner:
            units = pruner.choose(choice)
            if options.dry_run:
                size = pruner.size_bytes()
                done = Pruned(tuple(units), size, max(0, size - sum(unit.stored_bytes for unit in units)), False)
            else:
                done = pruner.prune(units)
    except StoreError as error:
        print(f"turngate prune: {error}", file=sys.stderr)
        return USAGE if isinstance(error, StoreMissing) else FAILED
    _print(done, dry_run=options.dry_run, as_json=options.json)
    if not (options.dry_run or done.vacuumed):
        print("turngate prune: taken out, but the disk has no room to vacuum; run it again then", file=sys.stderr)
        return FAILED
    return OK


def _print(done: Pruned, *, dry_run: bool, as_json: bool) -> None:
    states = Counter(unit.state for unit in done.units)
    rollouts, turns = sum(len(unit.rollouts) for unit in done.units), sum(unit.turns for unit in done.units)
    if as_json:
        values: dict[str, Any] = {"dry_run": dry_run, "groups": sum(unit.group is not None for unit in done.units)}
        values |= {"rollouts": rollouts, "turns": turns, "states": dict(states)}
        print(json.dumps({**values, "before_bytes": done.before_bytes, "after_bytes": done.after_bytes}))
        return
    what = ", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "nothing"
    would = "would take out" if dry_run else "took out"
    about = "about " if dry_run else ""
    print(f"{would} {rollouts} rollouts with {turns} turns ({what})")
    print(f"databases: {done.before_bytes / 1e6:.1f} MB before, {about}{done.after_bytes / 1e6:.1f} MB after")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="turngate prune",
        description=HELP,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("store", type=Path, help="a store folder, or a run folder that has one")
    parser.add_argument("--older-than", type=_seconds, metavar="AGE", help="finished longer ago, e.g. 36h, 7d, 2w")
    parser.add_argument("--max-size", type=_bytes, metavar="SIZE", help="the oldest until this is left, e.g. 20GB")
    parser.add_argument(
        "--state",
        action="append",
        default=[],
        choices=STATES,
        help="groups by fate, rollouts without a group by outcome; may be repeated (default: all but trained)",
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would be taken out")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of words")
    return parser


def _seconds(text: str) -> float:
    if text[-1:] not in _TIMES_S:
        raise argparse.ArgumentTypeError(f"{text!r}: a number with s, m, h, d or w, such as 7d")
    try:
        return float(text[:-1]) * _TIMES_S[text[-1]]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: a number with s, m, h, d or w, such as 7d") from None


def _bytes(text: str) -> int:
    number = text.rstrip("KMGTBkmgtb")
    unit = text[len(number) :].upper()
    try:
        return round(float(number) * _SIZES[unit if unit in ("", "B") or unit.endswith("B") else f"{unit}B"])
    except (ValueError, KeyError):
        raise argparse.ArgumentTypeError(f"{text!r}: a number with KB, MB, GB or TB, such as 20GB") from None
