"""When a step's groups are there: enough that teach something, or the whole batch of a synchronous schedule."""

from __future__ import annotations

from typing import Any

import pytest

from turngate.trainer.loader import QUIET_S, Arrival, PlanTerms

GROUP: Any = object()


class Source:
    """What an arrival asks of a lease source: the gateway's groups by state."""

    def __init__(self, **states: int) -> None:
        self.states: dict[str, int] | None = states

    def group_states(self) -> dict[str, int] | None:
        return self.states


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def arrival(source: Any, *, sync: bool = True, clock: Clock | None = None) -> Arrival:
    """Of steps, or batches, of three groups; it has looked once, before any came."""
    one = Arrival(source, PlanTerms(3, 4, None, whole_batches=sync), clock=clock or Clock())
    assert not one.complete([])
    return one


def test_an_asynchronous_step_counts_only_what_teaches_something() -> None:
    source = Source()
    one = arrival(source, sync=False)
    source.states = {"zero_variance": 7}
    assert not one.complete([GROUP] * 2)
    assert one.complete([GROUP] * 3)


def test_a_batch_is_complete_with_its_last_group_whatever_that_teaches() -> None:
    source = Source(trained=20, dropped=1)
    one = arrival(source)
    source.states = {"trained": 20, "dropped": 1, "leased": 1, "open": 2}
    assert not one.complete([GROUP])
    source.states = {"trained": 20, "dropped": 2, "leased": 1, "open": 1}
    assert not one.complete([GROUP])
    source.states = {"trained": 20, "dropped": 2, "leased": 1, "zero_variance": 1}
    assert one.complete([GROUP])


def test_a_batch_waits_for_groups_that_are_closed_but_not_here_yet() -> None:
    source = Source()
    one = arrival(source)
    for states in ({"leased": 2, "ready": 1}, {"leased": 3}):
        source.states = states
        assert not one.complete([GROUP] * 2)
    assert one.complete([GROUP] * 3)


def test_nothing_is_trained_while_a_group_is_generated_however_many_have_come() -> None:
    source = Source()
    one = arrival(source)
    source.states = {"zero_variance": 4, "leased": 1, "open": 1}
    assert not one.complete([GROUP])


@pytest.mark.parametrize("states", [{"zero_variance": 3}, {"zero_variance": 1, "dropped": 2}, {"dropped": 3}])
def test_a_batch_that_teaches_nothing_is_not_counted_to_the_next(states: dict[str, int]) -> None:
    source = Source()
    one = arrival(source)
    source.states = states
    assert not one.complete([])
    source.states = {**states, "leased": 1}
    assert not one.complete([GROUP]), "the next batch has begun with one group"
    source.states = {**states, "leased": 1, "trained": 2}
    assert one.complete([GROUP])


def test_what_the_next_batch_closes_before_the_trainer_looks_again_counts_for_it() -> None:
    source = Source()
    one = arrival(source)
    source.states = {"leased": 3}
    assert one.complete([GROUP] * 3)
    source.states = {"trained": 3, "zero_variance": 2, "leased": 1}
    assert one.complete([GROUP])


def test_a_short_batch_is_trained_when_nothing_has_come_for_long() -> None:
    source, clock = Source(), Clock()
    one = arrival(source, clock=clock)
    clock.now_s = QUIET_S + 1
    source.states = {"leased": 1}
    assert not one.complete([GROUP]), "the place of one rollout is free, the next one's session not open yet"
    source.states = {"leased": 1, "zero_variance": 1}
    clock.now_s += QUIET_S - 0.1
    assert not one.complete([GROUP])
    clock.now_s += QUIET_S - 0.1
    assert not one.complete([GROUP]), "something came meanwhile"
    clock.now_s += 0.2
    assert one.complete([GROUP])


def test_a_gateway_that_does_not_answer_has_told_nothing() -> None:
    source = Source()
    one = arrival(source)
    source.states = None
    assert not one.complete([GROUP] * 2)
    assert one.complete([GROUP] * 3)
