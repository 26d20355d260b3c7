"""Rates, paired differences and alarms of evaluations, on values written out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngate.harnesses.evaluation import Attempt
from turngate.harnesses.rollout import Result
from turngate.proxy.wire import Answers
from turngate.trainer import eval_log
from turngate.trainer.alarms import alarms
from turngate.trainer.eval_settings import EvalSettings
from turngate.trainer.eval_stats import figures, paired_difference, solve_rate
from turngate.trainer.step_log import METRICS

RESULT = Result("r", "t", "g", "scored", 1.0, None, "", 1.0, 3, 2)


def attempt(task: str, reward: float | None, *, calls: int = 2, cut: int = 0, empty: int = 0) -> Attempt:
    result = replace(RESULT, task=task, reward=reward)
    if reward is None:
        result = replace(result, outcome="unscorable", cause="harness_timeout")
    return Attempt(result, Answers(turns=4, tool_calls=calls, truncated=cut, empty=empty, completion_tokens=100))


def test_figures_count_what_was_scored_and_name_the_rest() -> None:
    attempts = [attempt("a", 1.0, calls=3), attempt("a", 0.0, cut=1), attempt("b", 1.0, empty=2), attempt("b", None)]
    found = figures(attempts, {"a": "one", "b": "two"}, 1.0)
    assert (found["scored"], found["solved"], found["attempts"]) == (3, 2, 4)
    assert found["by_set"]["one"]["rate"] == 0.5
    assert found["by_set"]["two"]["rate"] == 1.0
    assert found["causes"] == {"harness_timeout": 1}
    assert (found["truncated_share"], found["empty_share"]) == (1 / 12, 2 / 12)
    assert (found["tool_calls_per_solved"], found["turns_mean"], found["tokens_mean"]) == (2.5, 4.0, 100.0)


def test_the_interval_of_a_rate_is_wilsons() -> None:
    low, high = solve_rate({"a": [1.0] * 10}, 1.0)["ci"]
    assert low == pytest.approx(0.7225, abs=1e-3)
    assert high == pytest.approx(1.0)
    assert solve_rate({}, 1.0)["rate"] is None


def test_a_difference_is_paired_by_task_and_certain_when_every_task_agrees() -> None:
    before = {"a": [0.0, 0.0], "b": [0.0, 1.0], "only": [1.0]}
    after = {"a": [1.0, 0.0], "b": [1.0, 1.0], "c": [0.0]}
    gap = paired_difference(before, after, solved_at=1.0, draws=500)
    assert gap is not None
    assert (gap.mean, gap.low, gap.high, gap.tasks) == (0.5, 0.5, 0.5, 2)
    assert paired_difference({"a": [1.0]}, {"b": [1.0]}, solved_at=1.0, draws=500) is None


rewards = st.dictionaries(st.sampled_from("abcdef"), st.lists(st.sampled_from([0.0, 0.5, 1.0]), max_size=3))


@given(rewards, rewards)
def test_the_difference_lies_in_its_interval_and_changes_sign_with_the_order(
    before: dict[str, list[float]], after: dict[str, list[float]]
) -> None:
    there = paired_difference(before, after, solved_at=1.0, draws=400)
    back = paired_difference(after, before, solved_at=1.0, draws=400)
    if there is None or back is None:
        assert there is back
        return
    assert there.mean == pytest.approx(-back.mean)
    assert there.low - 1e-9 <= there.mean <= there.high + 1e-9
    assert (there.low, there.high) == pytest.approx((-back.high, -back.low))


def record(name: str, step: int, solved: int, of: int = 10, **more: Any) -> dict[str, Any]:
    tasks = {f"t{n}": [1.0 if n < solved else 0.0] for n in range(of)}
    found = figures([attempt(task, one[0]) for task, one in tasks.items()], dict.fromkeys(tasks, "s"), 1.0)
    return {"name": name, "version": step, "step": step, "adapter": None, "alarms": [], **found, **more}


def steps(rewards: list[float], entropy: list[float] | None = None) -> list[dict[str, Any]]:
    spread = entropy or [1.0] * len(rewards)
    return [
        {"step": n + 1, "reward_mean": r, "entropy": e} for n, (r, e) in enumerate(zip(rewards, spread, strict=True))
    ]


def test_a_healthy_run_rings_no_alarm() -> None:
    assert (
        alarms([record("start", 0, 4), record("step-9", 9, 7)], steps([0.1 * n for n in range(9)]), EvalSettings())
        == []
    )


@pytest.mark.parametrize(
    ("evals", "made", "word"),
    [
        ([record("start", 0, 5, truncated_share=0.5)], steps([]), "truncation"),
        ([record("start", 0, 5, empty_share=0.5)], steps([]), "empty answers"),
        ([record("start", 0, 5)], steps([0.5] * 6, [1, 1, 1, 0.05, 0.05, 0.05]), "entropy collapse"),
        ([record("start", 0, 9), record("step-9", 9, 2)], steps([0.1 * n for n in range(9)]), "held-out falls"),
    ],
)
def test_each_alarm_rings(evals: list[dict[str, Any]], made: list[dict[str, Any]], word: str) -> None:
    (said,) = alarms(evals, made, EvalSettings())
    assert said.startswith(word)


def test_a_fall_without_more_reward_is_no_alarm() -> None:
    assert alarms([record("start", 0, 9), record("step-9", 9, 2)], steps([0.5] * 9), EvalSettings()) == []


def test_what_goes_to_the_trackers_is_documented_and_said_in_words() -> None:
    versus = {"difference": 0.25, "ci": [0.1, 0.4], "tasks": 10}
    one = record("step-9", 9, 7, versus_base=versus, versus_start=versus)
    found = eval_log.eval_metrics(one)
    assert found.keys() == eval_log.EVAL_METRICS.keys()
    assert found.keys() <= METRICS.keys()
    assert "7 of 10 solved, 70.0 %" in eval_log.sentence(one)
    assert "+25.0 over base (+10.0 to +40.0)" in eval_log.sentence(one)


def test_a_line_being_written_is_not_read(tmp_path: Any) -> None:
    eval_log.append(tmp_path, record("start", 0, 3))
    with (tmp_path / eval_log.FILE).open("a") as file:
        file.write('{"name": "st')
    assert [one["name"] for one in eval_log.read(tmp_path)] == ["start"]
