"""`turngate tasks stats`: what a store says of each task: attempts, solve rate with interval, causes of failure.

Reads only, also while a gateway writes. Unscorable attempts stand outside the rate and are counted by cause.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

from turngate.proxy.arguments import Parser
from turngate.proxy.store.errors import StoreError, StoreMissing
from turngate.proxy.store.reader import StoreReader
from turngate.proxy.store.records import RolloutRecord

OK, FAILED, USAGE = 0, 1, 2
DESCRIPTION = "Attempts, solve rate with its 95 % interval and causes of failure by task, from a store or a run."
EPILOG = "exit status: 0 ok, 1 the store cannot be read, 2 no such store or wrong usage"
Z95 = 1.959963984540054


@dataclass(slots=True)
class TaskStats:
    """One task. `low` and `high` are Wilson's 95 % interval (JASA 22, 1927); None where nothing was scored."""

    task: str
    attempts: int = 0
    scored: int = 0
    solved: int = 0
    rate: float | None = None
    low: float | None = None
    high: float | None = None
    reward_mean: float | None = None
    causes: dict[str, int] = field(default_factory=dict)


def task_stats(records: Iterable[RolloutRecord], solved_at: float) -> list[TaskStats]:
    """Statistics by task, sorted by name; rollouts that are open are not counted."""
    rewards: dict[str, list[float]] = defaultdict(list)
    causes: dict[str, Counter[str]] = defaultdict(Counter)
    attempts: Counter[str] = Counter()
    for record in records:
        if record.state != "finished":
            continue
        name = record.new.task
        attempts[name] += 1
        if record.outcome == "scored" and record.reward is not None:
            rewards[name].append(record.reward)
        else:
            causes[name][record.cause or record.outcome or "unknown"] += 1
    return [_of(name, attempts[name], rewards[name], causes[name], solved_at) for name in sorted(attempts)]


def _of(name: str, attempts: int, rewards: Sequence[float], causes: Counter[str], solved_at: float) -> TaskStats:
    stats = TaskStats(name, attempts, len(rewards), causes=dict(causes.most_common()))
    if rewards:
        n, square = len(rewards), Z95 * Z95
        stats.solved = sum(reward >= solved_at for reward in rewards)
        stats.rate, stats.reward_mean = stats.solved / n, sum(rewards) / n
        centre = (stats.rate + square / (2 * n)) / (1 + square / n)
        half = Z95 * math.sqrt(stats.rate * (1 - stats.rate) / n + square / (4 * n * n)) / (1 + square / n)
        stats.low, stats.high = max(0.0, centre - half), min(1.0, centre + half)
    return stats


def stats_command(argv: Sequence[str]) -> int:
    """Print the statistics of a store; the exit status (0 ok, 1 the store cannot be read, 2 no such store or usage)."""
    parser = Parser(
        prog="turngate tasks stats",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("store", help="a store, or the folder of a run")
    parser.add_argument("--solved-at", type=float, default=1.0, metavar="R", help="reward that counts as solved (1)")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    options = parser.parse_args(list(argv))
    try:
        with StoreReader(options.store) as reader:
            found = task_stats(reader.rollouts(), options.solved_at)
    except StoreError as error:
        print(f"turngate tasks stats: {error}", file=sys.stderr)
        return USAGE if isinstance(error, StoreMissing) else FAILED
    print(json.dumps([asdict(one) for one in found], indent=2) if options.json else _text(found))
    return OK


def _text(found: Sequence[TaskStats]) -> str:
    lines = []
    for one in found:
        rate = "not scored"
        if one.rate is not None and one.low is not None and one.high is not None:
            rate = f"{100 * one.rate:.0f} % solved ({100 * one.low:.0f} to {100 * one.high:.0f} %)"
        causes = ", ".join(f"{count} × {cause}" for cause, count in one.causes.items())
        line = f"{one.task}  {one.attempts} attempts, {one.scored} scored, {rate}"
        lines.append(f"{line}; {causes}" if causes else line)
    return "\n".join(lines) or "no finished rollouts"
