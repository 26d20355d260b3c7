"""The question before sampling: is there space; and after a failed write, is there again."""

from __future__ import annotations

from pathlib import Path

import pytest

from turngate.proxy.store.errors import StoreFull
from turngate.proxy.store.space import PROBE_EVERY_S, SpaceProbe, free_space_bytes


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_free_space_above_the_reserve_is_enough(tmp_path: Path) -> None:
    SpaceProbe(tmp_path, 0).check()


def test_less_than_the_reserve_is_refused_in_numbers(tmp_path: Path) -> None:
    reserve = free_space_bytes(tmp_path) * 2
    with pytest.raises(StoreFull, match=f"min_free_bytes is {reserve}"):
        SpaceProbe(tmp_path, reserve).check()


def test_a_folder_that_is_gone_takes_nothing(tmp_path: Path) -> None:
    with pytest.raises(StoreFull, match="cannot be reached: No such file or directory"):
        SpaceProbe(tmp_path / "gone", 0).check()


def test_after_a_failed_write_one_must_succeed_before_anything_is_sampled(tmp_path: Path) -> None:
    clock = Clock()
    probe = SpaceProbe(tmp_path, 0, clock)
    probe.failed()
    with pytest.raises(StoreFull, match="until one succeeds"):
        probe.check()
    clock.now_s += PROBE_EVERY_S
    probe.check()
    probe.check()
    assert list(tmp_path.iterdir()) == []
