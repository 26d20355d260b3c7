"""Groups become rows: advantages, fates, and whole rollouts only."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.make import group, rollout, wire_row
from turngate.proxy.rows import Row
from turngate.trainer.rows import ADVANTAGE_EPS, advantages, ready_group

REWARDS = st.lists(st.floats(-100, 100, allow_nan=False), min_size=2, max_size=16)


@given(REWARDS)
def test_advantages_are_centred_and_at_most_unit_spread(rewards: list[float]) -> None:
    found = advantages(rewards)
    assert abs(found.mean()) < 1e-6
    assert found.std() <= 1.0 + 1e-9


def test_advantages_follow_the_formula() -> None:
    rewards = np.array([0.0, 1.0, 1.0, 0.5])
    expected = (rewards - 0.625) / (np.sqrt(((rewards - 0.625) ** 2).mean()) + ADVANTAGE_EPS)
    assert advantages(rewards.tolist()) == pytest.approx(expected)


def test_a_group_of_equal_rewards_is_zero_variance_and_has_no_rows() -> None:
    ready = ready_group(group("g", rollout("a", 1.0, wire_row("a", [1], [2])), rollout("b", 1.0)))
    assert (ready.fate, ready.rows) == ("zero_variance", ())


def test_unscorable_rollouts_stand_outside_the_baseline_and_are_counted_by_cause() -> None:
    ready = ready_group(
        group(
            "g",
            rollout("a", 1.0, wire_row("a", [1], [2])),
            rollout("b", 0.0, wire_row("b", [1], [3])),
            rollout("c", None, outcome="unscorable", cause="sandbox"),
        )
    )
    assert ready.rewards == (1.0, 0.0)
    assert ready.uncounted == {"sandbox": 1}
    assert {row.rollout: round(row.advantage, 2) for row in ready.rows} == {"a": 1.0, "b": -1.0}


def test_one_survivor_is_not_enough_to_compare() -> None:
    ready = ready_group(
        group("g", rollout("a", 1.0, wire_row("a", [1], [2])), rollout("b", None, outcome="cancelled", cause="stale"))
    )
    assert ready.fate == "dropped"
    assert "1 scored" in (ready.cause or "")


def test_every_row_of_a_rollout_has_its_advantage_and_its_arrays_untouched() -> None:
    first, second = wire_row("a", [1, 2], [3, 4, 5], 7), wire_row("a", [1, 9], [8], 8)
    ready = ready_group(group("g", rollout("a", 1.0, first, second), rollout("b", 0.0, wire_row("b", [1], [6]))))
    mine = [row for row in ready.rows if row.rollout == "a"]
    assert len({row.advantage for row in mine}) == 1
    for row, source in zip(mine, (first, second), strict=True):
        for name in ("ids", "mask", "logprobs", "versions"):
            np.testing.assert_array_equal(getattr(row, name), getattr(source, name))


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (
            Row("a", ("t",), np.array([1, 2]), np.array([False, True]), np.array([0, np.nan]), np.array([-1, 0])),
            "finite",
        ),
        (Row("a", ("t",), np.array([1, 2]), np.array([False, True]), np.array([0, 0.5]), np.array([-1, 0])), "above 0"),
        (Row("a", ("t",), np.array([1, 2]), np.array([True, True]), np.array([-1, -1]), np.array([0, 0])), "prompt"),
        (Row("a", ("t",), np.array([1, 2]), np.array([False, True]), np.array([0, -1]), np.array([-1, -1])), "version"),
        (wire_row("a", range(50), range(50)), "token_budget"),
    ],
)
def test_one_bad_row_keeps_its_whole_rollout_out(broken: Row, why: str) -> None:
    good = wire_row("a", [1], [2])
    ready = ready_group(
        group("g", rollout("a", 1.0, good, broken), rollout("b", 0.0, wire_row("b", [1], [3]))), max_row_tokens=60
    )
    assert {row.rollout for row in ready.rows} == {"b"}
    assert len(ready.rewards) == 2
    (cause,) = ready.unadmitted
    assert why in cause
