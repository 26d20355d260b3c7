"""Solve rates and their intervals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngate.harnesses.rollout import Result
from turngate.harnesses.summary import as_text, summarise, telling, wilson


def result(reward: float | None, *, group: str = "g", cause: str | None = None) -> Result:
    """One finished rollout."""
    outcome = "scored" if reward is not None else "unscorable"
    return Result("id", "task", group, outcome, reward, cause, "", 1.0, 0, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("solved", "scored", "low", "high"),
    [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1.0), (1, 100, 0.0018, 0.0545)],
)
def test_wilson_agrees_with_published_values(solved: int, scored: int, low: float, high: float) -> None:
    assert wilson(solved, scored) == pytest.approx((low, high), abs=1e-4)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_interval_holds_the_rate_and_stays_within_zero_and_one(counts: tuple[int, int]) -> None:
    low, high = wilson(*counts)
    assert 0 <= low <= counts[0] / counts[1] + 1e-12
    assert counts[0] / counts[1] - 1e-12 <= high <= 1


def test_unscorable_rollouts_are_outside_the_rate_and_counted_by_cause() -> None:
    found = [result(1.0), result(0.5), result(None, cause="sandbox_start"), result(None, cause="sandbox_start")]
    summary = summarise(found, solved_at=1.0)
    assert (summary.rollouts, summary.scored, summary.solved, summary.solve_rate) == (4, 2, 1, 0.5)
    assert summary.causes == {"sandbox_start": 2}
    assert "2 × sandbox_start" in as_text(summary)


@pytest.mark.parametrize(
    ("printed", "line"),
    [
        ("    ^^^^\n  File 'x.py', line 3, in post\n    raise APIError(r)\napi.BadRequestError: no tools", "api.Bad"),
        (
            "node:1\nError: spawn ENOENT\n    at onErrorNT (node:7)\n    at process (node:9)\n\nNode.js v24",
            "Error: spawn",
        ),
        ("warming up\nkilled", "killed"),
        ("status 400: version 99 is not live", "status 400: version 99 is not live"),
        ("", ""),
    ],
)
def test_of_what_an_agent_printed_the_telling_line_is_shown(printed: str, line: str) -> None:
    assert telling(printed).startswith(line)


def test_groups_whose_rewards_differ_are_counted() -> None:
    found = [result(1.0, group="a"), result(0.0, group="a"), result(1.0, group="b"), result(1.0, group="b")]
    summary = summarise(found, solved_at=1.0)
    assert (summary.groups, summary.varied_groups) == (2, 1)


def test_a_run_without_scores_has_no_rate() -> None:
    summary = summarise([result(None, cause="no_turns")], solved_at=1.0)
    assert (summary.solve_rate, summary.solve_low, summary.reward_mean) == (None, None, None)
    assert "solved" not in as_text(summary)
