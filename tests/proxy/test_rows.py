"""Rows: every sampled token of a trained label is trained exactly once, and stands where it was sampled."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.proxy.trees import LABELS, make_turn, trees
from turngate.proxy.rows import build_rows
from turngate.proxy.turns import BrokenTree, Turn, by_id, path_ids

labels = st.sets(st.sampled_from(LABELS))


@given(trees(), labels)
def test_every_sampled_token_of_a_trained_label_is_in_exactly_one_row(turns: list[Turn], trained: set[str]) -> None:
    rows = build_rows(turns, trained)
    seen = Counter(int(token) for row in rows for token in row.ids[row.mask])
    wanted = Counter(int(token) for turn in turns if turn.label in trained for token in turn.completion_ids)
    assert seen == wanted


@given(trees())
def test_a_row_is_the_path_of_a_turn_and_holds_its_log_probs_and_versions(turns: list[Turn]) -> None:
    known = by_id(turns)
    version_of = {
        int(token): span.version
        for turn in turns
        for span in turn.spans
        for token in turn.completion_ids[span.start : span.end]
    }
    paths = {path_ids(known, turn).tobytes() for turn in turns}
    for row in build_rows(turns, LABELS):
        assert row.ids.tobytes() in paths
        assert row.ids.dtype == np.int32
        assert len(row.ids) == len(row.mask) == len(row.logprobs) == len(row.versions)
        assert np.array_equal(row.logprobs, np.where(row.mask, -row.ids, 0).astype(np.float32))
        expected = [version_of[int(token)] if masked else -1 for token, masked in zip(row.ids, row.mask, strict=True)]
        assert row.versions.tolist() == expected


@given(trees())
def test_a_row_trains_whole_turns_in_order(turns: list[Turn]) -> None:
    known = by_id(turns)
    named = [turn for row in build_rows(turns, LABELS) for turn in row.turns]
    assert sorted(named) == sorted(turn.id for turn in turns if len(turn.completion_ids))
    for row in build_rows(turns, LABELS):
        pieces = np.concatenate([known[turn].completion_ids for turn in row.turns])
        assert np.array_equal(row.ids[row.mask], pieces)


@given(trees(), labels)
def test_every_branch_that_samples_something_has_a_row_of_its_own(turns: list[Turn], trained: set[str]) -> None:
    known = by_id(turns)
    continued = {turn.base for turn in turns if turn.base and turn.base_tokens == known[turn.base].path_tokens}
    ends = [turn for turn in turns if turn.id not in continued]
    rows = build_rows(turns, trained)
    for turn in turns:
        if turn.label not in trained or not len(turn.completion_ids):
            continue
        (row,) = [row for row in rows if turn.id in row.turns]
        path = path_ids(known, turn)
        assert np.array_equal(row.ids[: len(path)], path)
        assert row.mask[turn.prompt_tokens : turn.path_tokens].all()
        if turn in ends:
            assert row.turns[-1] == turn.id
            assert len(row.ids) == len(path)
    assert len(rows) <= len(ends)


@given(trees(), st.randoms(use_true_random=False))
def test_the_order_of_turns_does_not_matter(turns: list[Turn], random: object) -> None:
    shuffled = list(turns)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert [row.turns for row in build_rows(shuffled)] == [row.turns for row in build_rows(turns)]


@given(trees())
def test_a_straight_conversation_is_one_row(turns: list[Turn]) -> None:
    straight: list[Turn] = []
    for turn in turns:
        base = straight[-1] if straight else None
        tokens = base.path_tokens if base else 0
        kind = "spliced" if base else "first"
        tail = np.ones(1, dtype=np.int32)
        changes = {"kind": kind, "base": base.id if base else None, "base_tokens": tokens, "tail_ids": tail}
        straight.append(replace(turn, label="main", **changes))
    sampled = sum(len(turn.completion_ids) for turn in straight)
    assert len(build_rows(straight)) == (1 if sampled else 0)


def _pair(**changes: object) -> list[Turn]:
    return [make_turn("a", 0), make_turn("b", 1, **{"kind": "spliced", "base": "a", "base_tokens": 2, **changes})]


@pytest.mark.parametrize(
    "turns",
    [_pair(base="gone"), _pair(base_tokens=3), _pair()[1:], [replace(_pair()[0], seq=2), _pair()[1]]],
    ids=["missing base", "short base", "lost base", "late base"],
)
def test_a_broken_tree_is_refused(turns: list[Turn]) -> None:
    with pytest.raises(BrokenTree):
        build_rows(turns)


def test_log_probs_must_be_one_a_token() -> None:
    short = make_turn("a", 0, completion_ids=np.arange(5, dtype=np.int32))
    with pytest.raises(BrokenTree, match="5 tokens, 1 log-probs"):
        build_rows([short])


def test_a_turn_sampled_under_a_grammar_is_context_and_never_trained() -> None:
    ids = {name: np.arange(start, start + 2, dtype=np.int32) for start, name in enumerate("abc")}
    one = make_turn("a", 0, kind="first", completion_ids=ids["a"], logprobs=np.zeros(2, np.float32))
    grammar = {"flags": ("shaped:response_format",)}
    base = {"kind": "spliced", "base": "a", "base_tokens": one.path_tokens}
    two = make_turn("b", 1, completion_ids=ids["b"], logprobs=np.zeros(2, np.float32), **base, **grammar)
    base = {"kind": "spliced", "base": "b", "base_tokens": two.path_tokens}
    three = make_turn("c", 2, completion_ids=ids["c"], logprobs=np.zeros(2, np.float32), **base)
    (row,) = build_rows([one, two, three])
    assert row.turns == ("a", "c")
    assert row.mask.sum() == 4
    assert not row.mask[two.prompt_tokens : two.path_tokens].any()
    assert len(row.ids) == three.path_tokens


def test_a_title_asked_for_before_the_first_turn_with_tools_is_not_trained() -> None:
    tools = {"tools": [{"type": "function", "function": {"name": "bash"}}]}
    title = make_turn("title", 0, request={"messages": []})
    more = make_turn("more", 1, kind="spliced", base="title", base_tokens=2, request={"messages": []})
    main = make_turn("main", 2, request={"messages": [], **tools})
    assert [row.turns for row in build_rows([title, more])] == [("title", "more")]
    assert [row.turns for row in build_rows([title, more, main])] == [("main",)]
    assert [row.turns for row in build_rows([title, more, main], {"side"})] == [("title", "more")]


def test_a_conversation_that_gets_its_tools_later_stays_the_main_one() -> None:
    tools = {"tools": [{"type": "function", "function": {"name": "bash"}}]}
    plan = make_turn("plan", 0, request={"messages": []})
    work = make_turn(
        "work",
        1,
        kind="break",
        break_cause="tools_changed",
        base="plan",
        base_tokens=2,
        request={"messages": [], **tools},
    )
    assert [row.turns for row in build_rows([plan, work])] == [("plan", "work")]
