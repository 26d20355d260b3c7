"""Every setting of supervised fine-tuning: `turngate sft`'s flags and the launch file's `warm_start.sft:` section."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from turngate.trainer.settings import REPORT_TO, REPORT_TO_WORDS, LoraSettings
from turngate.trainer.tracking import Tracker

DEFAULT_WHERE = "reward >= 1"

SFT_METRICS: dict[str, str] = {
    "step": "optimizer steps done, this one included",
    "loss": "mean negative log-probability of the step's learnt tokens",
    "token_accuracy": "share of the learnt tokens that were the likeliest",
    "entropy": "mean entropy of the next-token distribution, in nats",
    "learning_rate": "of this step",
    "grad_norm": "norm of the gradient before clipping",
    "epoch": "how many times all rows were learnt",
    "hardest_loss": "the same as loss of one token id: the largest among those that a quarter of the rows has",
}


class SftTuning(BaseModel):
    """How the rows are learnt."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    epochs: float = Field(3.0, gt=0, description="how many times all rows are learnt")
    learning_rate: float = Field(2e-4, gt=0, description="peak learning rate of AdamW")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field("linear", description="after the warm-up")
    warmup_share: float = Field(0.05, ge=0, lt=1, description="share of the steps with linear warm-up")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decay of the adapter's weights")
    max_grad_norm: float = Field(1.0, gt=0, description="gradients are clipped to this norm")
    rows_per_step: int = Field(8, ge=1, description="rows of one optimizer step; a multiple of rows_per_forward")
    rows_per_forward: int = Field(1, ge=1, description="rows of one forward; more are faster and need more memory")
    max_row_tokens: int = Field(8192, ge=16, description="longer rows are left out, and counted")
    gradient_checkpointing: bool = Field(False, description="recompute activations: less memory, about 20 % slower")

    @model_validator(mode="after")
    def _steps_of_whole_forwards(self) -> Self:
        if self.rows_per_step % self.rows_per_forward:
            raise ValueError(f"rows_per_step={self.rows_per_step} is no multiple of {self.rows_per_forward}")
        return self


class SftSettings(SftTuning, LoraSettings):
    """Settings of one supervised fine-tuning."""

    model: str = Field(description="hub name or folder of the base model, the one whose tokens the store holds")
    store: Path = Field(description="a store or a run folder; or rows that `turngate export` wrote as .jsonl")
    where: str = Field(DEFAULT_WHERE, description="which rollouts' rows, as `turngate export --where` reads it")
    output: Path = Field(Path("sft"), description="folder of the adapter, rows.jsonl and metrics.jsonl")
    adapter: Path | None = Field(None, description="PEFT adapter to go on from; unset: a new one")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="of the base weights; use the engine's")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where to train")
    threads: int | None = Field(None, ge=1, description="torch's CPU threads; unset: 1 on a GPU, else torch decides")
    seed: int = Field(0, ge=0, description="of the adapter's first weights and of the order of rows")
    report_to: tuple[Tracker, ...] = Field(REPORT_TO, description=REPORT_TO_WORDS)
    run_name: str | None = Field(None, description="the run's name at the trackers; trackio's default is `sft`")
    run_folder: Path | None = Field(None, description="the run whose trackio project it belongs to; unset: `output`")
