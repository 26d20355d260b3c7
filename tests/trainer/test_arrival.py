"""When a step's groups are there: enough that teach something, or the whole batch of a synchronous schedule."""

from __future__ import annotations

from typing import Any

from turngate.trainer.loader import Arrival, PlanTerms

GROUP: Any = object()


class Source:
    """The two things of a lease source that an arrival looks at."""

    passed_over = 0
    arrived = False

    def all_arrived(self) -> bool:
        return self.arrived


def arrival(source: Any, *, sync: bool = True) -> Arrival:
    return Arrival(source, PlanTerms(3, 4, None, whole_batches=sync))


def test_an_asynchronous_step_counts_only_what_teaches_something() -> None:
    source = Source()
    one = arrival(source, sync=False)
    source.passed_over = 7
    assert not one.complete([GROUP] * 2)
    assert one.complete([GROUP] * 3)


def test_a_batch_is_complete_with_its_last_group_whatever_that_teaches() -> None:
    source = Source()
    one = arrival(source)
    assert not one.complete([GROUP])
    source.passed_over = 1
    assert not one.complete([GROUP])
    one.dropped = 1
    assert one.complete([GROUP])


def test_a_batch_that_teaches_nothing_is_not_counted_to_the_next() -> None:
    source = Source()
    one = arrival(source)
    source.passed_over = 3
    assert not one.complete([])
    assert not one.complete([GROUP])
    source.passed_over = 5
    assert one.complete([GROUP])


def test_what_is_left_of_a_batch_is_trained_when_nothing_more_can_come() -> None:
    source = Source()
    one = arrival(source)
    source.arrived = True
    assert not one.complete([GROUP])
    assert one.complete([GROUP])
