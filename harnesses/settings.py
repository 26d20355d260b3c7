"""Settings of the runner, as one pydantic model: the `run:` section of a launch file and the options of `turngate run`.

Unknown keys are errors. Every field says what it does; the documentation is compared with these words by a test.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from turngate.harnesses.base import HarnessOptions
from turngate.harnesses.sandbox import Limits
from turngate.proxy import wire
from turngate.tasks.dataset import DatasetOptions

ADMIN_KEY_ENV = "TURNGATE_ADMIN_KEY"


class TeacherSettings(BaseModel):
    """A teacher behind an OpenAI-compatible endpoint, reached by the gateway."""

    model_config = ConfigDict(extra="forbid")

    url: str = Field(description="base URL, `/v1` included")
    model: str = Field(description="the teacher's model name there")
    api_key_env: str | None = Field(None, description="variable of the gateway's environment that holds the key")
    params: dict[str, Any] = Field(default_factory=dict, description="more of the request, such as temperature")


class RunSettings(BaseModel):
    """What to run, how much of it at once, and when to stop."""

    model_config = ConfigDict(extra="forbid")

    gateway: str = Field("http://127.0.0.1:8400", description="URL of the gateway")
    admin_key_file: Path | None = Field(
        None, description=f"file with the gateway's administration key; without it the variable {ADMIN_KEY_ENV}"
    )
    tasks: str = Field(
        "tasks/words",
        description="a Harbor task directory, a folder of them, a set (words, dataops:train), or a dataset: a file, "
        "a folder, or hf:owner/name",
    )
    dataset: DatasetOptions = Field(default_factory=DatasetOptions, description="how rows of a dataset become tasks")
    harness: str = Field("pi", description="name of the agent")
    harness_options: HarnessOptions = Field(default_factory=HarnessOptions, description="options of the agent")
    model: str | None = Field(None, description="model name the agent asks for; default: the policy's name")
    policy: str | None = Field(None, description="policy alias of the sessions; default: the gateway's own")
    pin: Literal["rollout", "turn"] = Field("rollout", description="whether a rollout stays on one adapter version")
    history: Literal["template", "append"] = Field(
        "template", description="what wins where a template rewrites history"
    )
    training: bool = Field(True, description="whether rollouts may be trained on; false for evaluation")
    teacher: Literal["oracle"] | TeacherSettings | None = Field(
        None,
        description="who answers instead of the policy: `oracle` plays each task's solution/steps.json, a mapping "
        "(url, model, api_key_env, params) names another model; such rollouts are demonstrations, never trained by RL",
    )
    version: int | None = Field(
        None, ge=0, description="adapter version to evaluate, 0: the base; needs training=false; default: the newest"
    )
    fixed_seeds: bool = Field(
        False, description="attempt n of a task samples with a seed made of both, so that runs can be compared in pairs"
    )
    trained_labels: list[wire.TrainedLabel] = Field(
        ["main"],
        description="whose turns are trained (never side calls); add subagent if the reward judges delegated work too",
    )
    sampling: dict[str, Any] = Field(default_factory=dict, description="sampling that wins over what the agent sends")
    budgets: wire.Budgets = Field(
        default_factory=wire.Budgets, description="what one rollout may spend; a spent one ends the agent's run"
    )
    sandbox: Literal["bubblewrap", "docker", "process"] = Field(
        "bubblewrap", description="`docker` builds the task's Dockerfile, `process` isolates nothing"
    )
    docker_host: str | None = Field(
        None, description="address of the Docker daemon, e.g. unix:///run/docker.sock; default: the environment's"
    )
    docker_image: str | None = Field(None, description="image of tasks without environment/Dockerfile; never pulled")
    docker_build_network: str | None = Field(
        None, description="network of image builds (`none`, `host`, …), never of rollouts; default: Docker's own"
    )
    limits: Limits = Field(default_factory=Limits, description="what one sandbox may use")
    concurrency: int = Field(8, ge=1, description="rollouts in flight")
    group_size: int = Field(4, ge=1, description="rollouts of one task that are compared with each other")
    extra_rollouts: int = Field(
        0, ge=0, description="rollouts of a group beyond group_size; the first group_size scored count, the rest end"
    )
    retries: int = Field(
        1, ge=0, le=10, description="new sessions for a rollout that failed before its first turn, within its deadline"
    )
    groups: int | None = Field(None, ge=1, description="how many groups to run; default: until told to stop")
    epochs: int | None = Field(None, ge=1, description="how many times to go through all tasks; default: no limit")
    deadline_s: float = Field(300.0, gt=0, description="longest rollout, from its start to the end of the agent")
    group_deadline_s: float | None = Field(
        None,
        gt=0,
        description="after this a group is scored from at least two survivors and what runs of it is ended; "
        "default: twice deadline_s",
    )
    max_ready_groups: int | None = Field(
        None, ge=1, description="start no new group while this many wait for the trainer; default: no limit"
    )
    batch_groups: int | None = Field(
        None,
        ge=1,
        description="synchronous schedule: begin so many groups, and the next so many only when the trainer has "
        "settled those and published; the launch sets it with `schedule: sync`",
    )
    gateway_patience_s: float = Field(120.0, gt=0, description="how long to wait for a gateway that is down")
    solved_at: float = Field(1.0, description="reward from which a rollout counts as solved")
    seed: int = Field(0, description="seed of the order of tasks")
    out: Path | None = Field(
        None,
        description="folder for runner.jsonl, journal.jsonl and faults/; started again with it, a run goes on where it "
        "was; a file `stop` in it ends the run",
    )
    scratch: Path | None = Field(None, description="folder for workspaces; default: the system's temporary folder")

    @property
    def group_deadline(self) -> float:
        """Seconds a group has from its first rollout."""
        return self.group_deadline_s or 2 * self.deadline_s

    @field_validator("gateway")
    @classmethod
    def _is_a_url(cls, value: str) -> str:
        if not value.startswith(("http://", "https://")):
            raise ValueError("must begin with http:// or https://, as http://127.0.0.1:8400")
        return value

    @field_validator("sampling")
    @classmethod
    def _has_known_keys(cls, value: dict[str, Any]) -> dict[str, Any]:
        for key in value:
            if key not in wire.SAMPLING_KEYS:
                near = difflib.get_close_matches(key, wire.SAMPLING_KEYS, n=1, cutoff=0.5)
                hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(wire.SAMPLING_KEYS)}"
                raise ValueError(f"{key} is no sampling setting; {hint}")
        return value

    def admin_key(self) -> str:
        """The administration key.

        Raises:
            ValueError: there is none; the message says where it is looked for.
        """
        if self.admin_key_file is not None:
            try:
                key = self.admin_key_file.read_text().strip()
            except UnicodeDecodeError as error:
                raise ValueError(f"admin_key_file: {self.admin_key_file} holds no key: it is no text") from error
            except OSError as error:
                raise ValueError(f"admin_key_file: cannot read {self.admin_key_file}: {error.strerror}") from error
            if not key:
                raise ValueError(f"admin_key_file: {self.admin_key_file} is empty; the gateway writes it at its start")
            return key
        key = os.environ.get(ADMIN_KEY_ENV, "")
        if not key:
            raise ValueError(f"no administration key: set admin_key_file, or the variable {ADMIN_KEY_ENV}")
        return key
