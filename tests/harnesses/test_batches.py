"""The synchronous schedule: when the next batch may begin."""

from __future__ import annotations

from tests import statuses
from turngate.harnesses.batches import PUBLISH_PATIENCE_S, Batches
from turngate.proxy import wire


def status(version: int = 0, **groups: int) -> wire.Status:
    policy = wire.PolicyInfo(policy="policy", base_model="base", version=version, live=[])
    return statuses.status(groups, policies=[policy])


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def begun(size: int = 2) -> tuple[Batches, Clock]:
    clock = Clock()
    batches = Batches(size, "policy", clock=clock)
    assert batches.may_begin(status())
    for _ in range(size):
        batches.begin_group()
    return batches, clock


def test_a_batch_is_open_until_it_has_all_its_groups() -> None:
    batches = Batches(2)
    assert not batches.open
    assert batches.may_begin(status())
    batches.begin_group()
    assert batches.open
    batches.begin_group()
    assert not batches.open


def test_the_next_batch_waits_for_groups_generated_finished_or_leased() -> None:
    batches, _ = begun()
    for state in ("open", "ready", "leased"):
        assert not batches.may_begin(status(**{state: 1, "trained": 1}, version=1))


def test_the_next_batch_waits_for_the_version_made_of_the_last() -> None:
    batches, _ = begun()
    assert not batches.may_begin(status(trained=1, zero_variance=1))
    assert batches.may_begin(status(version=1, trained=1, zero_variance=1))
    batches.begin_group()
    batches.begin_group()
    assert not batches.may_begin(status(version=1, trained=3, zero_variance=1))


def test_a_batch_that_taught_nothing_is_followed_at_once() -> None:
    batches, _ = begun()
    assert batches.may_begin(status(zero_variance=1, dropped=1))


def test_a_publication_that_failed_does_not_hold_the_runner_for_ever() -> None:
    batches, clock = begun()
    assert not batches.may_begin(status(trained=2))
    clock.now_s = PUBLISH_PATIENCE_S - 1
    assert not batches.may_begin(status(trained=2))
    clock.now_s = PUBLISH_PATIENCE_S
    assert batches.may_begin(status(trained=2))


def test_a_runner_started_again_waits_for_what_was_left() -> None:
    batches = Batches(2, "policy")
    assert not batches.may_begin(status(version=3, trained=5, leased=1))
    assert batches.may_begin(status(version=4, trained=6))
