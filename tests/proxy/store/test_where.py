"""`--where`: what it selects, and that it says what is wrong instead of guessing."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngate.proxy.store.records import RolloutRecord
from turngate.proxy.store.where import Where, WhereError
from turngate.proxy.wire import NewRollout, ScriptTeacher

SCRIPT = ScriptTeacher.model_validate({"turns": [{"content": "a"}]})
NEW = NewRollout(task="csv-join-01", harness="pi", training=False, upstream=SCRIPT, metadata={"level": 2})
RECORD = RolloutRecord(
    id="r1",
    new=NEW,
    policy="policy",
    version=0,
    state="finished",
    outcome="scored",
    cause=None,
    reward=1.0,
    rewards={"tests": 0.5},
    metrics={},
    created_at_ns=0,
    finished_at_ns=1,
    member=False,
    sealed_turns=1,
    seal=b"",
)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("", True),
        ("reward >= 1", True),
        ("0 < reward < 1", False),
        ('demonstration and reward >= 1 and harness == "pi"', True),
        ('task in ["csv-join-01", "other"]', True),
        ('"join" in task', True),
        ('not (outcome == "scored")', False),
        ("rewards.tests > 0.4 and metadata.level == 2", True),
        ("metadata.missing > 1", False),
        ("cause is None", True),
        ('cause == "x" or reward > -1', True),
        ('label == "main"', True),
    ],
)
def test_an_expression_selects(text: str, meant: bool) -> None:
    assert Where.parse(text).accepts(RECORD, "main") is meant


def test_a_rollout_without_a_reward_is_in_no_range() -> None:
    unscored = dataclasses.replace(RECORD, reward=None)
    assert not Where.parse("reward < 1 or reward >= 1").accepts(unscored)
    assert Where.parse("reward == None").accepts(unscored)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rewards >= 1", "rewards.KEY"),
        ("rewrd >= 1", "unknown field 'rewrd'; there are: reward"),
        ("task.name == 1", "task.name"),
        ("__import__('os').system('true')", "not allowed"),
        ("(lambda: 1)()", "not allowed"),
        ("reward >=", "cannot read"),
        ("reward + 1 > 1", "not allowed"),
    ],
)
def test_what_is_no_such_expression_is_refused_with_words(text: str, words: str) -> None:
    with pytest.raises(WhereError, match=words.replace("(", r"\(")):
        Where.parse(text)


def test_values_that_cannot_be_compared_are_said() -> None:
    with pytest.raises(WhereError, match="cannot be compared"):
        Where.parse('reward > "a"').accepts(RECORD)


@given(st.text())
def test_any_text_is_an_expression_or_an_error_with_words(text: str) -> None:
    try:
        found: Any = Where.parse(text).accepts(RECORD)
    except WhereError:
        return
    assert isinstance(found, bool)
