"""Every setting of the trainer, with its meaning: the launch file's `train:` section and `turngate train`'s flags.

One pydantic model, so file, flags and docs cannot drift; unknown keys are errors. It holds values only and is safe to
write down with a run: the administration key is named by file or environment, never stored.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from turngate.trainer.errors import SettingsError
from turngate.trainer.tracking import Tracker

ADMIN_KEY_VARIABLE = "TURNGATE_ADMIN_KEY"

REPORT_TO: tuple[Tracker, ...] = ("trackio",)
REPORT_TO_WORDS = "trackers; trackio needs no server and writes to the run's folder, empty: none"

Credit = Literal["each", "split"]
"""What the rows of one rollout get of its advantage: `each` all of it, `split` an equal share."""


@dataclass(frozen=True, slots=True)
class LossSettings:
    """Bounds of the loss: the ratio is clipped to `[1 - clip_low, 1 + clip_high]`, a token's weight to `is_cap`."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    is_cap: float = 2.0


class LoraSettings(BaseModel):
    """The adapter: the same for supervised fine-tuning and for RL, which goes on from it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lora_r: int = Field(8, ge=1, description="rank of the adapter; the engine's --max-lora-rank must allow it")
    lora_alpha: float = Field(16.0, gt=0, description="scale of the adapter; the delta is multiplied by alpha / r")
    lora_targets: tuple[str, ...] = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        min_length=1,
        description="names of the linear modules that get an adapter",
    )
    lora_last_layers: int | None = Field(None, ge=1, description="only the last so many layers; unset: all")


class TrainSettings(LoraSettings):
    """Settings of one training run."""

    model: str = Field(description="hub name or folder of the base model, the one the engine serves")
    gateway: str = Field("http://127.0.0.1:8400", description="base URL of the gateway")
    admin_key_file: Path | None = Field(
        None, description=f"file holding the gateway's administration key; else the variable {ADMIN_KEY_VARIABLE}"
    )
    policy: str = Field("policy", description="policy alias whose groups are trained and whose adapter is published")
    adapter: Path | None = Field(
        None,
        description="PEFT adapter to begin from, such as `turngate sft` writes: published as the first version before "
        "any step; its own rank, alpha and targets hold",
    )
    output: Path = Field(Path("train"), description="folder of checkpoints, adapters and metrics.jsonl")
    resume: bool = Field(True, description="go on from the newest complete checkpoint in `output`, when there is one")

    steps: int = Field(100, ge=1, description="optimizer steps of the whole run, those before a resume included")
    groups_per_step: int = Field(2, ge=1, description="whole groups trained in one optimizer step")
    schedule: Literal["async", "sync"] = Field(
        "async",
        description="`async`: a step trains `groups_per_step` groups that teach something, as they come; `sync`: the "
        "runner generates `groups_per_step` groups and waits, a step trains those of them that teach something",
    )
    credit: Credit = Field(
        "each",
        description="what the rows of one rollout get (it has several after a break or a compaction, and where "
        "sub-agents are trained): `each` the rollout's advantage, `split` an equal share of it",
    )
    token_budget: int = Field(
        8192, ge=16, description="most tokens of one forward (shared prefixes once); longer rollouts are not trained"
    )
    max_staleness: int = Field(
        4,
        ge=0,
        description="tokens sampled more than this many versions ago are masked; rollouts that could give no younger "
        "ones are cancelled",
    )
    idle_timeout_s: float | None = Field(
        None, gt=0, description="end the run cleanly when no group came for this long; unset: wait for ever"
    )

    learning_rate: float = Field(1e-5, gt=0, description="peak learning rate of AdamW")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="after the warm-up")
    warmup_steps: int = Field(0, ge=0, description="steps of linear warm-up")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decay of the adapter's weights")
    max_grad_norm: float = Field(1.0, gt=0, description="gradients are clipped to this norm")
    temperature: float = Field(
        1.0, gt=0, description="the sampling temperature; must be the one rollouts are sampled at"
    )
    clip_low: float = Field(0.2, gt=0, lt=1, description="the ratio is clipped below 1 - clip_low")
    clip_high: float = Field(0.28, gt=0, description="the ratio is clipped above 1 + clip_high")
    kl_coefficient: float = Field(
        0.0, ge=0, description="weight of the KL to the base model in the loss; above 0 costs one more forward"
    )
    is_cap: float = Field(2.0, ge=1, description="largest importance weight of a token")

    dtype: Literal["float32", "bfloat16"] = Field("float32", description="of the base weights; use the engine's")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where to train")
    gradient_checkpointing: bool = Field(False, description="recompute activations: less memory, about 20 % slower")
    threads: int | None = Field(None, ge=1, description="torch's CPU threads; unset: 1 on a GPU, else torch decides")
    seed: int = Field(0, ge=0, description="of the adapter's first weights and of torch")

    save_steps: int = Field(1, ge=1, description="a durable checkpoint each so many steps")
    keep_checkpoints: int = Field(3, ge=2, description="how many complete checkpoints stay on disk")
    keep_adapters: int = Field(8, ge=2, description="how many published adapter folders stay on disk")
    report_to: tuple[Tracker, ...] = Field(REPORT_TO, description=REPORT_TO_WORDS)
    run_name: str | None = Field(None, description="the run's name at the trackers; trackio's default is `train`")
    await_evaluation_s: float | None = Field(
        None,
        gt=0,
        description="after the last step wait so long for the run's last evaluation, so that trackers other than "
        "trackio get it too; the launcher sets it where there is one",
    )

    lease_ttl_s: float = Field(300.0, gt=0, description="how long the gateway keeps a leased group without a heartbeat")
    prefetch_steps: int = Field(1, ge=0, description="steps' worth of groups leased ahead; more means staler tokens")
    gateway_patience_s: float = Field(600.0, gt=0, description="a gateway without an answer for longer ends the run")
    engine_url: str | None = Field(
        None, description="base URL of one vLLM server: each publication is then checked with a canary prompt"
    )

    @field_validator("gateway", "engine_url")
    @classmethod
    def _is_a_url(cls, url: str | None) -> str | None:
        if url is not None and not url.startswith(("http://", "https://")):
            raise ValueError("must begin with http:// or https://, as http://127.0.0.1:8400")
        return url

    @model_validator(mode="after")
    def _cap_above_clip(self) -> TrainSettings:
        if self.is_cap < 1 + self.clip_high:
            raise ValueError(
                f"is_cap={self.is_cap} is below 1 + clip_high={1 + self.clip_high}: nothing would be clipped"
            )
        return self

    @property
    def loss(self) -> LossSettings:
        """The loss's own settings."""
        return LossSettings(self.clip_low, self.clip_high, self.is_cap)

    def admin_key(self) -> str:
        """The administration key, read now.

        Raises:
            SettingsError: neither the file nor the environment variable has one.
        """
        if self.admin_key_file is not None:
            try:
                key = self.admin_key_file.read_text().strip()
            except UnicodeDecodeError as error:
                raise SettingsError(f"admin_key_file: {self.admin_key_file} holds no key: it is no text") from error
            except OSError as error:
                raise SettingsError(f"admin_key_file {self.admin_key_file} cannot be read: {error}") from error
        else:
            key = os.environ.get(ADMIN_KEY_VARIABLE, "").strip()
        if not key:
            raise SettingsError(f"no administration key: set admin_key_file or the variable {ADMIN_KEY_VARIABLE}")
        return key
