"""What is evaluated, when, and what rings an alarm: the launch file's `eval:` section.

One pydantic model, unknown keys are errors. Without tasks nothing is evaluated; it must never change what is trained.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class EvalSettings(BaseModel):
    """Held-out evaluation beside the training: the base once, the start, every so many steps, the end."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tasks: list[str] = Field(
        default_factory=list, description="held-out task sets, named as `run.tasks` is; empty: nothing is evaluated"
    )
    attempts: int = Field(4, ge=1, description="attempts at each task, each with a fixed seed of its own")
    every_steps: int = Field(10, ge=1, description="evaluate the newest version once so many steps went by")
    base: bool = Field(True, description="evaluate the base model first, once, to compare with")
    concurrency: int = Field(16, ge=1, description="evaluation rollouts in flight, beside those of training")
    sampling: dict[str, Any] = Field(default_factory=dict, description="over `run.sampling`, such as a temperature")
    deadline_s: float | None = Field(None, gt=0, description="longest rollout; default: that of `run`")
    end_patience_s: float = Field(1800.0, gt=0, description="how long the last evaluation may take after the training")
    bootstrap_draws: int = Field(4000, ge=100, description="resamples of the tasks behind an interval of a difference")
    alarm_truncated: float = Field(0.2, gt=0, le=1, description="alarm: larger share of answers cut by a token limit")
    alarm_empty: float = Field(0.1, gt=0, le=1, description="alarm: larger share of answers without text or tool call")
    alarm_entropy: float = Field(
        0.2, ge=0, lt=1, description="alarm: entropy of the last 3 steps below this share of that of the first 3"
    )
