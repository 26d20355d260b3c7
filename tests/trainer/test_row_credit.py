"""Credit of rollouts that have several rows: main, what follows a compaction, sub-agents; no token twice, none lost."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.proxy.trees import LABELS, trees
from tests.trainer.make import RawTokens, group, rollout, wire_row
from turngate.proxy.rows import Row, build_rows
from turngate.proxy.turns import Turn
from turngate.trainer.planner import plan_step
from turngate.trainer.rows import GroupRows, TrainRow, advantages, ready_group, row_advantage
from turngate.trainer.settings import Credit, TrainSettings

credits_ = st.sampled_from(["each", "split"])
rewards = st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=2, max_size=4).filter(lambda some: len(set(some)) > 1)


@st.composite
def forests(draw: st.DrawFn) -> list[list[Turn]]:
    """The turns of some rollouts, with breaks, forks and all labels, each with something to train."""
    made = []
    for _ in range(draw(st.integers(2, 3))):
        turns = draw(trees().filter(lambda turns: any(len(turn.completion_ids) for turn in turns)))
        made.append([replace(turn, spans=tuple(replace(s, version=0) for s in turn.spans)) for turn in turns])
    return made


@given(forests(), st.sets(st.sampled_from(LABELS), min_size=1), credits_)
def test_each_sampled_token_of_a_trained_label_is_credited_in_exactly_one_row_of_the_step(
    forest: list[list[Turn]], labels: set[str], credit: Credit
) -> None:
    built = [build_rows(turns, labels) for turns in forest]
    made = [rollout(f"r{i}", float(i), *rows) for i, rows in enumerate(built)]
    ready = ready_group(group("g", *made), credit=credit)
    admitted = {row.rollout for row in ready.rows}
    wanted = Counter(
        (f"r{i}", int(token))
        for i, turns in enumerate(forest)
        for turn in turns
        if turn.label in labels and f"r{i}" in admitted
        for token in turn.completion_ids
    )
    assert Counter((row.rollout, int(token)) for row in ready.rows for token in row.ids[row.mask]) == wanted
    plan = plan_step([ready], step=1, version=0, max_staleness=0, new_bin=lambda: RawTokens(10**6))
    assert Counter((row.row.rollout, int(t)) for row in plan.rows for t in row.row.ids[row.mask]) == wanted
    assert plan.tokens == sum(wanted.values())


def _cut(name: str, tokens: int, cuts: list[int]) -> list[Row]:
    """One rollout's `tokens` sampled tokens as rows that end at `cuts`."""
    ends = sorted({0, tokens, *(cut % tokens for cut in cuts)})
    return [wire_row(name, (1, 2), range(100 + start, 100 + end)) for start, end in pairwise(ends)]


Shapes = list[tuple[int, list[int]]]
shapes = st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(0, 8), max_size=4)), min_size=4, max_size=4)


def _ready(some: list[float], shapes_: Shapes, credit: Credit) -> GroupRows:
    made = [rollout(f"r{i}", reward, *_cut(f"r{i}", *shapes_[i])) for i, reward in enumerate(some)]
    return ready_group(group("g", *made), credit=credit)


def _credit_of_tokens(rows: tuple[TrainRow, ...]) -> dict[tuple[str, int], float]:
    return {(row.rollout, int(token)): row.advantage for row in rows for token in row.ids[row.mask]}


@given(rewards, shapes)
def test_by_default_a_break_changes_no_tokens_credit(some: list[float], shapes_: Shapes) -> None:
    whole: Shapes = [(tokens, []) for tokens, _ in shapes_]
    assert _credit_of_tokens(_ready(some, shapes_, "each").rows) == _credit_of_tokens(_ready(some, whole, "each").rows)
    assert TrainSettings(model="m").credit == "each"


@given(rewards, shapes, credits_)
def test_every_token_of_a_row_and_every_row_of_a_rollout_has_the_same_credit_of_its_rollouts_sign(
    some: list[float], shapes_: Shapes, credit: Credit
) -> None:
    for i, advantage in enumerate(advantages(some)):
        mine = [row.advantage for row in _ready(some, shapes_, credit).rows if row.rollout == f"r{i}"]
        assert len(set(mine)) == 1
        assert np.sign(mine[0]) == np.sign(advantage)
        assert sum(mine) == pytest.approx(advantage * (len(mine) if credit == "each" else 1))


@given(st.floats(-10, 10), st.integers(1, 20), credits_)
def test_one_row_is_credited_the_same_by_both_rules(advantage: float, rows: int, credit: Credit) -> None:
    assert row_advantage(advantage, 1, credit) == advantage
    assert abs(row_advantage(advantage, rows, credit)) <= abs(advantage)
