"""When a run goes wrong in a way that its reward does not show: sentences, from the records of steps and evaluations.

Pure. An alarm only ever speaks: it stops nothing and changes no weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from turngate.trainer.errors import NotFinite
from turngate.trainer.eval_settings import EvalSettings
from turngate.trainer.eval_stats import paired_difference

FEW_STEPS = 3
"""Steps that are averaged at each end of a comparison."""

Record = Mapping[str, Any]


def alarms(
    evals: Sequence[Record], steps: Sequence[Record], settings: EvalSettings, solved_at: float = 1.0
) -> list[str]:
    """What is wrong after the newest evaluation, a sentence each, beginning with the alarm's name."""
    if not evals:
        return []
    found = [*_answers(evals[-1], settings), _entropy(steps, settings), _held_out(evals, steps, settings, solved_at)]
    return [sentence for sentence in found if sentence]


def publication_alarm(step: Record) -> str:
    """What to say of a step whose weights did not go live; empty when they did."""
    if not (step.get("settled") or {}).get("publication failed"):
        return ""
    return (
        f"publication: the weights of step {step['step']} did not go live, version {step['held_version']} stays routed "
        "to and training goes on; logs/trainer.log says why"
    )


def gradient_alarm(step: Record) -> str:
    """What to say of a step that changed no weight because its gradient was not finite; empty when it did."""
    dropped = (step.get("settled") or {}).get(f"dropped: {NotFinite.cause}")
    if not dropped:
        return ""
    return (
        f"gradient: that of step {step['step']} was not finite, so it changed no weight and its {dropped} groups are "
        "dropped; training goes on, logs/trainer.log says which"
    )


def name_of(alarm: str) -> str:
    """The alarm's name, which its sentence begins with."""
    return alarm.partition(":")[0]


def last_of_each(said: Sequence[str]) -> list[str]:
    """Of alarms that rang several times, what they said last."""
    return list({name_of(alarm): alarm for alarm in said}.values())


def _answers(newest: Record, settings: EvalSettings) -> list[str]:
    found = []
    if (cut := newest.get("truncated_share") or 0.0) > settings.alarm_truncated:
        found.append(f"truncation: {cut:.0%} of the answers are cut by a token limit")
    if (empty := newest.get("empty_share") or 0.0) > settings.alarm_empty:
        found.append(f"empty answers: {empty:.0%} of the answers have neither text nor a tool call")
    return found


def _entropy(steps: Sequence[Record], settings: EvalSettings) -> str:
    known = [float(step["entropy"]) for step in steps if step.get("entropy") is not None]
    if len(known) < 2 * FEW_STEPS:
        return ""
    first, last = fmean(known[:FEW_STEPS]), fmean(known[-FEW_STEPS:])
    if last >= settings.alarm_entropy * first:
        return ""
    return f"entropy collapse: {last:.3f} nats a token, {first:.3f} at first; the samples of a group hardly differ"


def _held_out(evals: Sequence[Record], steps: Sequence[Record], settings: EvalSettings, solved_at: float) -> str:
    """Training reward up since the best evaluation while the newest is below it by more than chance."""
    newest = evals[-1]
    trained = [one for one in evals[:-1] if one.get("rate") is not None and one["name"] != "base"]
    best = max(trained, key=lambda one: one["rate"], default=None)
    if best is None or newest.get("rate") is None:
        return ""
    gap = paired_difference(best["rewards"], newest["rewards"], solved_at=solved_at, draws=settings.bootstrap_draws)
    then = _reward([step for step in steps if step["step"] <= max(best["step"], FEW_STEPS)])
    now = _reward(steps)
    if gap is None or gap.high >= 0 or then is None or now is None or now <= then:
        return ""
    return (
        f"held-out falls: {newest['rate']:.1%} solved, {best['rate']:.1%} at step {best['step']}, while the training "
        f"reward rose from {then:.3f} to {now:.3f}"
    )


def _reward(steps: Sequence[Record]) -> float | None:
    known = [float(step["reward_mean"]) for step in steps if step.get("reward_mean") is not None]
    return fmean(known[-FEW_STEPS:]) if known else None
