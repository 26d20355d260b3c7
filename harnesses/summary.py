"""What a run amounted to: solve rate with a 95 % Wilson interval, rewards, and how many rollouts failed of what.

Pure functions on results. Unscorable rollouts are outside the rate, and counted by cause, so a broken sandbox cannot
pass for a bad policy.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, pstdev
from typing import Any

from turngate.harnesses.rollout import Result

Z95 = 1.959963984540054

ERROR = re.compile(r"error|exception|refused|failed|cannot", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Summary:
    """`solve_rate` and its interval are None when nothing was scored; `varied_groups` have rewards that
    differ; `examples` has one detail for each cause; `retried` counts sessions that failed before their first turn."""

    rollouts: int
    scored: int
    solved: int
    solve_rate: float | None
    solve_low: float | None
    solve_high: float | None
    reward_mean: float | None
    reward_std: float | None
    groups: int
    varied_groups: int
    turns: int
    causes: dict[str, int]
    retried: dict[str, int]
    examples: dict[str, str]
    by_task: dict[str, dict[str, float]]

    def as_json(self) -> dict[str, Any]:
        """The summary as one object."""
        return asdict(self)


def wilson(solved: int, scored: int, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval of a proportion (E. B. Wilson, JASA 22, 1927); `scored` must be positive."""
    rate, square = solved / scored, z * z
    centre = (rate + square / (2 * scored)) / (1 + square / scored)
    half = z * math.sqrt(rate * (1 - rate) / scored + square / (4 * scored * scored)) / (1 + square / scored)
    return max(0.0, centre - half), min(1.0, centre + half)


def summarise(results: Sequence[Result], solved_at: float) -> Summary:
    """The summary of `results`; a rollout whose reward is at least `solved_at` is solved."""
    scored = [(result, result.reward) for result in results if result.outcome == "scored" and result.reward is not None]
    rewards = [reward for _, reward in scored]
    solved = sum(reward >= solved_at for reward in rewards)
    low, high = wilson(solved, len(rewards)) if rewards else (None, None)
    groups: dict[str, list[float]] = defaultdict(list)
    tasks: dict[str, list[float]] = defaultdict(list)
    for result, reward in scored:
        groups[result.group].append(reward)
        tasks[result.task].append(reward)
    return Summary(
        rollouts=len(results),
        scored=len(rewards),
        solved=solved,
        solve_rate=solved / len(rewards) if rewards else None,
        solve_low=low,
        solve_high=high,
        reward_mean=fmean(rewards) if rewards else None,
        reward_std=pstdev(rewards) if rewards else None,
        groups=len({result.group for result in results}),
        varied_groups=sum(min(found) < max(found) for found in groups.values()),
        turns=sum(result.turns for result in results),
        causes=dict(Counter(result.cause for result in results if result.cause).most_common()),
        retried=dict(Counter(cause for result in results for cause in result.retried).most_common()),
        examples={r.cause: telling(r.detail) for r in reversed(results) if r.cause and r.detail},
        by_task={
            name: {
                "scored": len(found),
                "solve_rate": sum(reward >= solved_at for reward in found) / len(found),
                "reward_mean": fmean(found),
            }
            for name, found in sorted(tasks.items())
        },
    )


def telling(detail: str) -> str:
    """The line of what a failed agent printed that says most: the last that speaks of an error, else the last."""
    lines = [" ".join(line.split()) for line in detail.splitlines() if line.strip(" ^~")]
    errors = [line for line in lines if ERROR.search(line) and not line.startswith(("at ", "File ", "raise "))]
    return (errors or lines or [""])[-1][:300]


def as_text(summary: Summary) -> str:
    """A few lines for people."""
    lines = [f"{summary.rollouts} rollouts in {summary.groups} groups, {summary.turns} turns, {summary.scored} scored"]
    if summary.solve_rate is not None and summary.solve_low is not None and summary.solve_high is not None:
        lines.append(
            f"solved {100 * summary.solve_rate:.1f} %  "
            f"(95 % interval {100 * summary.solve_low:.1f} to {100 * summary.solve_high:.1f} %)"
        )
        lines.append(
            f"reward {summary.reward_mean:.3f} ± {summary.reward_std:.3f}; "
            f"{summary.varied_groups} groups have rewards that differ"
        )
    for cause, count in summary.causes.items():
        example = summary.examples.get(cause)
        lines.append(f"  {count} × {cause}" + (f", e.g. {example}" if example else ""))
    for cause, count in summary.retried.items():
        lines.append(f"  {count} × {cause} before the first turn, tried again")
    return "\n".join(lines)
