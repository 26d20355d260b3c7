"""The soak's judgement: it must see a leak, a slowdown and a lost turn, or 30 minutes say nothing."""

from __future__ import annotations

from typing import Any

import pytest

from bench.soak import Pace, Seen, judge, lag_percentile_ms, slope, thirds

SOUND = {"ok": True, "turns": 100}


def samples(**growth: float) -> list[dict[str, float]]:
    """60 samples of a gateway of 100 MB, 20 files and 10 tasks; `growth` is added to a value at each."""
    base = {"rss_mb": 100.0, "files": 20.0, "tasks": 10.0}
    return [{name: value + growth.get(name, 0.0) * i for name, value in base.items()} for i in range(60)]


def failed(found: list[dict[str, float]], last: float = 50.0, report: dict[str, Any] = SOUND, **seen: Any) -> set[str]:
    made = Seen(turns=[(0.0, 0.05)] * 100, **seen)
    checks = judge(found, [50.0] * 100, [last] * 100, report, made)
    return {name for name, holds in checks.items() if not holds}


def test_a_flat_run_passes() -> None:
    assert failed(samples()) == set()


@pytest.mark.parametrize(("name", "check"), [("rss_mb", "memory"), ("files", "files"), ("tasks", "files")])
def test_what_grows_without_end_fails(name: str, check: str) -> None:
    assert failed(samples(**{name: 1.0})) == {check}


def test_slower_turns_an_error_and_a_lost_turn_fail() -> None:
    assert failed(samples(), last=500.0) == {"latency"}
    assert failed(samples(), errors=["HTTP 500"]) == {"errors"}
    assert failed(samples(), report={"ok": True, "turns": 99}) == {"verified"}
    assert failed(samples(), report={"ok": False, "turns": 100}) == {"verified"}


def test_figures_of_thirds_slope_and_lag() -> None:
    seen = Seen(turns=[(float(i), i / 1000) for i in range(90)])
    first, last = thirds(seen, 0.0, 90.0)
    assert (max(first), min(last)) == (29.0, 60.0)
    assert slope([(0.0, 1.0), (1.0, 3.0), (2.0, 5.0)]) == pytest.approx(2.0)
    head = "turngate_loop_lag_seconds"
    buckets = {f'{head}_bucket{{le="{bound}"}}': n for bound, n in (("0.001", 50.0), ("0.01", 99.0), ("+Inf", 100.0))}
    assert lag_percentile_ms({**buckets, f"{head}_count": 100.0}, 0.9) == 10.0


async def test_a_pace_without_a_rate_never_waits() -> None:
    pace = Pace(None)
    for _ in range(1000):
        await pace.turn()
