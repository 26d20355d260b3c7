"""The LoRA adapter of a model: its configuration from settings or from an adapter on disk, and its weights from there.

Supervised fine-tuning writes an adapter, RL goes on from it; both build it here, so it is one and the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftConfig, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoConfig

from turngate.trainer.errors import SettingsError
from turngate.trainer.publish import WEIGHTS
from turngate.trainer.settings import LoraSettings


def lora_config(settings: LoraSettings, model: str, adapter: Path | None) -> LoraConfig:
    """The configuration of the adapter to train: that of `adapter` where one is given, else the settings'.

    Raises:
        SettingsError: `adapter` is no LoRA adapter.
    """
    if adapter is not None:
        return _kept_config(adapter)
    layers: list[int] | None = None
    if settings.lora_last_layers is not None:
        total = AutoConfig.from_pretrained(model).get_text_config().num_hidden_layers
        layers = list(range(max(total - settings.lora_last_layers, 0), total))
    return LoraConfig(
        r=settings.lora_r,
        lora_alpha=settings.lora_alpha,  # type: ignore[arg-type]  # a float divides as well
        lora_dropout=0.0,
        target_modules=list(settings.lora_targets),
        layers_to_transform=layers,
        bias="none",
        task_type="CAUSAL_LM",
    )


def load_weights(model: Any, adapter: Path) -> None:
    """Put the weights of `adapter` into the adapter of a PEFT model that was built with its configuration.

    Raises:
        SettingsError: they are not there, or are of another adapter or model.
    """
    try:
        weights = load_file(adapter / WEIGHTS)
    except OSError as error:
        raise SettingsError(f"adapter {adapter} has no {WEIGHTS} that can be read: {error}") from error
    wanted = {name: tensor.shape for name, tensor in get_peft_model_state_dict(model).items()}
    found = {name: tensor.shape for name, tensor in weights.items()}
    if wanted != found:
        differing = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
        raise SettingsError(
            f"adapter {adapter} is not of this model: {differing[0]} differs, and {len(differing) - 1} more"
        )
    set_peft_model_state_dict(model, weights)


def _kept_config(adapter: Path) -> LoraConfig:
    if not (adapter / "adapter_config.json").is_file():
        raise SettingsError(f"adapter {adapter}: no adapter_config.json there; name a folder in PEFT's format")
    config = PeftConfig.from_pretrained(str(adapter))
    if not isinstance(config, LoraConfig):
        raise SettingsError(
            f"adapter {adapter} is {config.peft_type}, but only LoRA adapters can be trained and served"
        )
    config.inference_mode = False
    return config
