"""What attempts amount to: rates with intervals, paired differences, means. Pure functions on values.

An evaluation is compared with another one task by task, never by two overlapping intervals: the tasks differ far more
from each other than two policies do. Unscorable attempts are outside every rate, and counted by cause.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from turngate.harnesses.evaluation import Attempt
from turngate.harnesses.summary import wilson

Rewards = Mapping[str, Sequence[float]]
"""Rewards of the scored attempts by task."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean over `tasks` tasks of one solve rate minus another, with a 95 % interval."""

    mean: float
    low: float
    high: float
    tasks: int

    def as_json(self) -> dict[str, Any]:
        """The object in a record."""
        return {"difference": self.mean, "ci": [self.low, self.high], "tasks": self.tasks}


def paired_difference(
    before: Rewards, after: Rewards, *, solved_at: float, draws: int, seed: int = 0
) -> Difference | None:
    """`after - before` over the tasks scored in both; None when there is none.

    The interval is the percentile bootstrap over tasks (Efron 1979, Annals of Statistics 7): attempts of one task are
    not independent, tasks are.
    """
    names = sorted(name for name in before.keys() & after.keys() if before[name] and after[name])
    if not names:
        return None
    gaps = np.array([_rate(after[name], solved_at) - _rate(before[name], solved_at) for name in names])
    drawn = np.random.default_rng(seed).integers(0, len(gaps), size=(draws, len(gaps)))
    low, high = np.quantile(gaps[drawn].mean(axis=1), (0.025, 0.975))
    return Difference(float(gaps.mean()), float(low), float(high), len(names))


def rewards_by_task(attempts: Sequence[Attempt]) -> dict[str, list[float]]:
    """The scored attempts' rewards, by task."""
    found: dict[str, list[float]] = defaultdict(list)
    for attempt in attempts:
        if attempt.result.outcome == "scored" and attempt.result.reward is not None:
            found[attempt.result.task].append(attempt.result.reward)
    return dict(found)


def solve_rate(rewards: Rewards, solved_at: float) -> dict[str, Any]:
    """`{"scored", "solved", "rate", "ci"}` with Wilson's 95 % interval; the last two are None when nothing was scored.

    E. B. Wilson, JASA 22, 1927.
    """
    flat = [reward for found in rewards.values() for reward in found]
    solved = sum(reward >= solved_at for reward in flat)
    if not flat:
        return {"scored": 0, "solved": 0, "rate": None, "ci": None}
    return {
        "scored": len(flat),
        "solved": solved,
        "rate": solved / len(flat),
        "ci": list(wilson(solved, len(flat))),
    }


def figures(attempts: Sequence[Attempt], origin: Mapping[str, str], solved_at: float) -> dict[str, Any]:
    """Everything about one evaluation that needs no other one."""
    rewards = rewards_by_task(attempts)
    scored = [one for one in attempts if one.result.outcome == "scored" and one.result.reward is not None]
    told = [one.answers for one in scored if one.answers is not None]
    answers = sum(one.turns for one in told)
    solving = [a for a in scored if (a.result.reward or 0.0) >= solved_at and a.answers is not None]
    flat = [reward for found in rewards.values() for reward in found]
    sets = {name: {task: rewards[task] for task in rewards if origin.get(task) == name} for name in origin.values()}
    return {
        **solve_rate(rewards, solved_at),
        "by_set": {name: solve_rate(found, solved_at) for name, found in sets.items()},
        "attempts": len(attempts),
        "reward_mean": sum(flat) / len(flat) if flat else None,
        "turns_mean": answers / len(told) if told else None,
        "tokens_mean": sum(one.completion_tokens for one in told) / len(told) if told else None,
        "tool_calls_mean": sum(one.tool_calls for one in told) / len(told) if told else None,
        "tool_calls_per_solved": (
            sum(one.answers.tool_calls for one in solving if one.answers) / len(solving) if solving else None
        ),
        "truncated_share": sum(one.truncated for one in told) / answers if answers else None,
        "empty_share": sum(one.empty for one in told) / answers if answers else None,
        "causes": dict(Counter(one.result.cause for one in attempts if one.result.cause)),
        "rewards": rewards,
    }


def _rate(rewards: Sequence[float], solved_at: float) -> float:
    return sum(reward >= solved_at for reward in rewards) / len(rewards)
