"""TRL's names, imported in one place for one exact version, and what must be set around them.

TRL moves these names between releases, so the version is pinned exactly and a test lists every name used. Nothing but
this module imports TRL, and nothing but `trl_seam` uses what it imports.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import trl
from transformers import AutoConfig
from trl import import_utils

from turngate.trainer.errors import SeamBroken
from turngate.trainer.settings import TrainSettings
from turngate.trainer.sft_settings import SftSettings
from turngate.trainer.tracking import others

__all__ = [
    "TRL_VERSION",
    "AsyncGRPOConfig",
    "AsyncGRPOTrainer",
    "SFTConfig",
    "SFTTrainer",
    "any_layers",
    "arguments",
    "async_grpo_trainer",
    "check_version",
    "other_layers",
    "packing",
    "peak_flops_without_cuda",
    "sft_arguments",
]

TRL_VERSION = "1.16.0"


@contextlib.contextmanager
def _vllm_unseen() -> Iterator[None]:
    """TRL imports vLLM for its own weight transfer, unused here: a third of the start-up and a warning for nothing."""
    original = import_utils.is_vllm_available
    import_utils.is_vllm_available = lambda min_version=None: False
    try:
        yield
    finally:
        import_utils.is_vllm_available = original


with _vllm_unseen():
    from trl import SFTConfig, SFTTrainer
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing


def check_version() -> None:
    """Refuse to run on another TRL than the seam was written for.

    Raises:
        SeamBroken: with both versions.
    """
    if trl.__version__ != TRL_VERSION:
        raise SeamBroken(
            f"trl {trl.__version__} is installed, the seam is written for {TRL_VERSION}: pip install trl=={TRL_VERSION}"
        )


@contextlib.contextmanager
def peak_flops_without_cuda() -> Iterator[None]:
    """TRL asks CUDA for the device's name while it is built; without CUDA there is no answer and no need of one."""
    if torch.cuda.is_available():
        yield
        return
    original = async_grpo_trainer.get_peak_flops_per_device
    async_grpo_trainer.get_peak_flops_per_device = lambda accelerator, dtype: None
    try:
        yield
    finally:
        async_grpo_trainer.get_peak_flops_per_device = original


ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Layer types that a packed prefix tree can be routed through."""


def other_layers(model: str) -> list[str]:
    """The kinds of layers of a model that are no attention, sorted; recurrent and convolutional ones, say."""
    text = AutoConfig.from_pretrained(model).get_text_config()
    return sorted(set(getattr(text, "layer_types", None) or []) - ATTENTION_LAYERS)


@contextlib.contextmanager
def any_layers() -> Iterator[None]:
    """TRL refuses models with layers that are no attention, since it packs trees; here they are built for whole rows.

    The model is made with its own attention; its layer types are hidden from TRL's check and put back at the end.
    """
    original = async_grpo_trainer.create_model_from_path
    hidden: list[tuple[Any, Any]] = []

    def create(model_id: str, **kwargs: Any) -> Any:
        model = original(model_id, **{**kwargs, "attn_implementation": "sdpa"})
        text = model.config.get_text_config()
        hidden.append((text, text.layer_types))
        text.layer_types = None
        return model

    async_grpo_trainer.create_model_from_path = create
    try:
        yield
    finally:
        async_grpo_trainer.create_model_from_path = original
        for text, layer_types in hidden:
            text.layer_types = layer_types


def arguments(settings: TrainSettings) -> AsyncGRPOConfig:
    """TRL's configuration of a run: one plan is one batch, one optimizer step and one log line."""
    return AsyncGRPOConfig(
        output_dir=str(settings.output / "checkpoints"),
        max_steps=settings.steps,
        learning_rate=settings.learning_rate,
        lr_scheduler_type=settings.lr_schedule,
        warmup_steps=settings.warmup_steps,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        temperature=settings.temperature,
        epsilon=settings.clip_low,
        epsilon_high=settings.clip_high,
        dtype=settings.dtype,
        bf16=settings.dtype == "bfloat16",
        use_cpu=settings.device == "cpu" or not torch.cuda.is_available(),
        gradient_checkpointing=settings.gradient_checkpointing,
        token_budget=settings.token_budget,
        max_staleness=settings.max_staleness,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        logging_steps=1,
        save_strategy="steps",
        save_steps=settings.save_steps,
        save_total_limit=None,
        report_to=others(settings.report_to),
        run_name=settings.run_name,
        seed=settings.seed,
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
    )


def sft_arguments(settings: SftSettings, steps: int) -> SFTConfig:
    """TRL's configuration of supervised fine-tuning on rows that are tokens already: nothing is prepared or cut."""
    return SFTConfig(
        output_dir=str(settings.output),
        max_steps=steps,
        learning_rate=settings.learning_rate,
        lr_scheduler_type=settings.lr_schedule,
        warmup_steps=round(steps * settings.warmup_share),
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        bf16=settings.dtype == "bfloat16",
        use_cpu=settings.device == "cpu" or not torch.cuda.is_available(),
        gradient_checkpointing=settings.gradient_checkpointing,
        per_device_train_batch_size=settings.rows_per_forward,
        gradient_accumulation_steps=settings.rows_per_step // settings.rows_per_forward,
        model_init_kwargs={"dtype": settings.dtype},
        dataset_kwargs={"skip_prepare_dataset": True},
        max_length=None,
        packing=False,
        logging_steps=1,
        save_strategy="no",
        report_to=others(settings.report_to),
        run_name=settings.run_name,
        seed=settings.seed,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
