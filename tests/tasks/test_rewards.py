"""Rewards: a finite number in range, or nothing."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngate.tasks.errors import RewardInvalid
from turngate.tasks.rewards import parse_number, read_reward


@given(st.floats(-1e6, 1e6))
def test_every_number_in_range_is_read_exactly(value: float) -> None:
    assert parse_number(repr(value), -1e6, 1e6, "x") == value


@given(st.floats() | st.integers())
def test_nothing_outside_the_range_passes(value: float) -> None:
    try:
        read = parse_number(repr(value), 0.0, 1.0, "x")
    except RewardInvalid:
        assert not (math.isfinite(value) and 0 <= value <= 1)
    else:
        assert 0 <= read <= 1


@given(st.text(max_size=12))
def test_any_other_text_is_refused_not_guessed(text: str) -> None:
    with pytest.raises(RewardInvalid):
        parse_number(f"x{text}", 0.0, 1.0, "x")


def test_reward_txt_goes_before_reward_json(tmp_path: Path) -> None:
    (tmp_path / "reward.json").write_text('{"reward": 0.25, "style": 3}')
    assert read_reward(tmp_path, 0, 1).value == 0.25
    assert read_reward(tmp_path, 0, 1).parts == {"style": 3.0}
    (tmp_path / "reward.txt").write_text(" 0.5\n")
    assert read_reward(tmp_path, 0, 1).value == 0.5


def test_a_single_number_of_any_name_is_the_reward(tmp_path: Path) -> None:
    (tmp_path / "reward.json").write_text('{"correct": 1}')
    assert read_reward(tmp_path, 0, 1).value == 1.0


NO_REWARDS = ("[]", "{}", "1", '{"a": 1, "b": 1}', '{"reward": true}', '{"reward": "1"}', '{"reward": NaN}', "{")


@pytest.mark.parametrize("text", [*NO_REWARDS, '{"reward": 2}'])
def test_any_other_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "reward.json").write_text(text)
    with pytest.raises(RewardInvalid) as refused:
        read_reward(tmp_path, 0, 1)
    assert refused.value.cause == "reward_invalid"


def test_nothing_is_missing(tmp_path: Path) -> None:
    with pytest.raises(RewardInvalid) as refused:
        read_reward(tmp_path, 0, 1)
    assert refused.value.cause == "reward_missing"


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("1")
    (tmp_path / "reward.txt").symlink_to(tmp_path / "one")
    with pytest.raises(RewardInvalid):
        read_reward(tmp_path, 0, 1)


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "reward.txt").write_text("0" * 100_000)
    with pytest.raises(RewardInvalid):
        read_reward(tmp_path, 0, 1)


def test_parts_are_json_numbers(tmp_path: Path) -> None:
    (tmp_path / "reward.json").write_text(json.dumps({"reward": 1, "a": 0.5}))
    assert read_reward(tmp_path, 0, 1).parts == {"a": 0.5}
