"""Step plans are made when their groups are there, with the version held at that moment, and never ahead."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

from tests.trainer.make import RawTokens, simple_group
from turngate.trainer.loader import PlanLoader, PlanTerms
from turngate.trainer.planner import StepPlan
from turngate.trainer.rows import GroupRows


class Source:
    """Groups in a row; what was dropped."""

    def __init__(self, groups: Sequence[GroupRows]) -> None:
        self.left = list(groups)
        self.dropped: list[tuple[str, str]] = []

    def next_group(self, timeout_s: float) -> GroupRows | None:
        return self.left.pop(0) if self.left else None

    def drop(self, group: GroupRows, cause: str) -> None:
        self.dropped.append((group.id, cause))


def plans(source: Any, held: list[tuple[int, int]], *, budget: int = 1000) -> Iterator[StepPlan]:
    """Plans of two groups, at most two versions old; `held[0]` is the step just done and the version held."""
    terms = PlanTerms(groups_per_step=2, max_staleness=2, idle_timeout_s=0.01)
    loader = PlanLoader(source, terms, where=lambda: held[0], new_bin=lambda: RawTokens(budget), stop=threading.Event())
    return (item["plan"] for item in loader)


def test_staleness_is_counted_against_the_version_held_when_the_step_is_planned() -> None:
    groups = [simple_group(f"g{n}", [0.0, 1.0], versions=[1, 1, 3, 3]) for n in range(4)]
    held = [(0, 1)]
    made = plans(Source(groups), held)
    first = next(made)
    assert (first.version, first.tokens, first.staleness.dropped_tokens) == (1, 16, 0)
    held[0] = (1, 4)
    second = next(made)
    assert (second.step, second.version, second.tokens) == (2, 4, 8)
    assert (second.staleness.mean, second.staleness.max, second.staleness.dropped_tokens) == (1.0, 1, 8)


def test_a_group_that_became_too_old_while_it_waited_is_dropped_whole_with_its_cause() -> None:
    source = Source([simple_group(f"old{n}", [0.0, 1.0], versions=1) for n in range(3)])
    source.left += [simple_group(f"new{n}", [0.0, 1.0], versions=3) for n in range(2)]
    held = [(0, 1)]
    made = plans(source, held)
    assert [group.id for group in next(made).groups] == ["old0", "old1"]
    held[0] = (1, 4)
    second = next(made)
    assert [group.id for group in second.groups] == ["new0", "new1"]
    assert second.staleness.dropped_tokens == 8, "the dropped group's tokens are counted"
    assert source.dropped == [("old2", "every token older than max_staleness")]


def test_a_plan_takes_its_groups_and_no_more_and_waits_for_no_forward_to_be_full() -> None:
    source = Source([simple_group(f"g{n}", [0.0, 1.0]) for n in range(5)])
    made = plans(source, [(0, 0)])
    (forward,) = next(made).micro
    assert sum(len(row.row.ids) for row in forward[0]) == 28, "of 1000 that would fit"
    assert [group.id for group in source.left] == ["g2", "g3", "g4"], "nothing is planned ahead"
    next(made)
    assert next(made, None) is None, "one group is left: no step of half a batch"
