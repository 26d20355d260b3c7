"""A step is planned over whole groups, packed by budget, with stale tokens masked."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.make import RawTokens, simple_group
from turngate.trainer.planner import StepPlan, mask_stale, plan_step, usable
from turngate.trainer.rows import GroupRows

GROUPS = st.lists(
    st.tuples(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=5), st.integers(1, 9), st.integers(0, 6)),
    min_size=1,
    max_size=6,
)


def plan(
    groups: list[GroupRows], *, budget: int = 20, version: int = 4, max_staleness: int = 4, ranks: int = 1
) -> StepPlan:
    return plan_step(
        groups,
        step=1,
        version=version,
        max_staleness=max_staleness,
        new_bin=lambda: RawTokens(budget),
        ranks=ranks,
    )


@given(GROUPS, st.integers(12, 60), st.integers(1, 3))
def test_every_fresh_token_is_planned_once_and_no_forward_is_over_budget(
    specs: list[tuple[list[float], int, int]], budget: int, ranks: int
) -> None:
    groups = [simple_group(f"g{i}", r, versions=v, tokens=t) for i, (r, t, v) in enumerate(specs)]
    groups = [group for group in groups if group.fate == "trained"]
    made = plan(groups, budget=budget, version=6, max_staleness=3, ranks=ranks)
    planned = Counter(row.row.rollout for row in made.rows if row.tokens)
    expected = {row.rollout for group in groups for row in group.rows if 6 - row.versions.max() <= 3}
    assert planned == dict.fromkeys(expected, 1)
    assert made.tokens == sum(row.tokens for row in made.rows)
    for micro in made.micro:
        assert len(micro) == ranks
        for rows in micro:
            assert rows
            assert sum(len(row.row.ids) for row in rows) <= budget


def test_only_stale_tokens_are_masked_the_rest_of_the_row_is_trained() -> None:
    (row, _) = simple_group("g", [0.0, 1.0], versions=[1, 1, 5, 5]).rows
    planned = mask_stale(row, version=6, max_staleness=3)
    assert planned.mask.tolist() == [False] * 5 + [True] * 2
    assert (planned.stale_tokens, planned.tokens, planned.sampled_by) == (2, 2, 5)


def test_a_row_of_two_versions_was_sampled_by_neither() -> None:
    (row, _) = simple_group("g", [0.0, 1.0], versions=[4, 4, 5, 5]).rows
    assert mask_stale(row, version=5, max_staleness=3).sampled_by is None


def test_staleness_is_counted_over_trained_tokens() -> None:
    made = plan([simple_group("g", [0.0, 1.0], versions=[1, 3, 5, 6])], version=6, max_staleness=3)
    assert (made.staleness.mean, made.staleness.max, made.staleness.dropped_tokens) == (4 / 3, 3, 2)


def test_a_group_whose_every_token_is_too_old_is_not_usable() -> None:
    group = simple_group("g", [0.0, 1.0], versions=1)
    assert usable(group, version=4, max_staleness=3)
    assert not usable(group, version=5, max_staleness=3)


def test_rows_of_one_group_share_a_forward_when_they_fit() -> None:
    made = plan([simple_group(f"g{i}", [0.0, 1.0]) for i in range(3)], budget=14)
    assert [{row.row.group for row in ranks[0]} for ranks in made.micro] == [{"g0"}, {"g1"}, {"g2"}]


def test_the_last_micro_batch_is_completed_with_rows_that_train_nothing() -> None:
    made = plan([simple_group("g", [0.0, 1.0, 0.5])], budget=7, ranks=2)
    assert len(made.micro) == 2
    assert [row.tokens for row in made.rows] == [4, 4, 4, 0]


def test_a_version_newer_than_the_held_one_is_not_stale() -> None:
    made = plan([simple_group("g", [0.0, 1.0], versions=9)], version=6, max_staleness=0)
    assert (made.tokens, made.staleness.mean, made.staleness.max) == (8, 0.0, 0)
