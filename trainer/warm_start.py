"""`warm_start:` of a launch file: an adapter that RL begins from, given, or made of demonstrations or a store's rows.

A small model may know the commands and not the agent's way of calling tools: then no rollout earns anything and RL has
nothing to compare. Here stand the settings and what each stage's own settings follow from; `job.py` starts the stages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from turngate.harnesses.settings import RunSettings, TeacherSettings
from turngate.trainer.settings import TrainSettings
from turngate.trainer.sft_settings import DEFAULT_WHERE, SftSettings, SftTuning

DEMONSTRATED = "demonstration and ({where})"


class Demonstrations(BaseModel):
    """Rollouts that a teacher plays with the run's agent, in the run's sandbox, before training."""

    model_config = ConfigDict(extra="forbid")

    tasks: str | None = Field(None, description="tasks to demonstrate, such as dataops:train; default: run.tasks")
    limit: int | None = Field(None, ge=1, description="at most so many of them; default: all")
    attempts: int = Field(1, ge=1, description="demonstrations of each task")
    teacher: Literal["oracle"] | TeacherSettings = Field("oracle", description="as run.teacher")
    concurrency: int | None = Field(None, ge=1, description="rollouts at once; default: run.concurrency")


class WarmStart(BaseModel):
    """Where RL begins: exactly one of `demonstrations`, `store` and `adapter`."""

    model_config = ConfigDict(extra="forbid")

    demonstrations: Demonstrations | None = Field(None, description="make demonstrations, then learn from them")
    store: Path | None = Field(None, description="learn from the rows of this store, run folder or exported file")
    adapter: Path | None = Field(None, description="begin from this PEFT adapter, without learning anything first")
    where: str = Field(DEFAULT_WHERE, description="which rollouts are learnt from, as `turngate export --where`")
    sft: SftTuning = Field(default_factory=SftTuning, description="how they are learnt")

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        given = [name for name in ("demonstrations", "store", "adapter") if getattr(self, name) is not None]
        if len(given) != 1:
            said = " and ".join(given) or "none"
            raise ValueError(f"give exactly one of demonstrations, store and adapter, not {said}")
        return self


def demonstration_settings(run: RunSettings, wanted: Demonstrations, out: Path) -> RunSettings:
    """The runner's settings for the demonstrations; `run` is the run's own, with its gateway filled in."""
    return run.model_copy(
        update={
            "tasks": wanted.tasks or run.tasks,
            "teacher": wanted.teacher,
            "training": False,
            "concurrency": wanted.concurrency or run.concurrency,
            "group_size": wanted.attempts,
            "extra_rollouts": 0,
            "groups": wanted.limit,
            "epochs": 1,
            "max_ready_groups": None,
            "out": out,
        }
    )


def learnt(out: Path) -> dict[str, Any]:
    """The summary of the fine-tuning in `out`; empty where it is not there."""
    path = out / "sft.json"
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def in_a_line(summary: Mapping[str, Any]) -> str:
    """A fine-tuning's summary for people; empty without one."""
    if not summary.get("rows"):
        return ""
    text = (
        f"{summary['rows']} rows of {summary['tasks']} tasks, {summary['steps']} steps, "
        f"loss {summary['loss_first']:.3g} to {summary['loss_last']:.3g}"
    )
    for one in summary.get("hardest", ())[:1]:
        text += f", the hardest token {one['token']!r} ends at {one['loss_last']:.3g}"
    return text


def sft_settings(train: TrainSettings, wanted: WarmStart, store: Path, out: Path) -> SftSettings:
    """The settings of the fine-tuning; model, precision and adapter are the trainer's, `store` is the run's own."""
    where = DEMONSTRATED.format(where=wanted.where) if wanted.demonstrations is not None else wanted.where
    shared = set(SftSettings.model_fields) & set(TrainSettings.model_fields) - set(SftTuning.model_fields)
    values = {name: getattr(train, name) for name in shared - {"output", "adapter", "run_name"}}
    own = {
        "store": wanted.store or store,
        "where": where,
        "output": out,
        "run_folder": train.output,
        "run_name": f"{train.run_name}-sft" if train.run_name else None,
    }
    return SftSettings(**{**wanted.sft.model_dump(), **values, **own})
