"""The seam with TRL's SFTTrainer: rows of tokens in, a LoRA adapter and a line a step out.

TRL keeps the model, the collator, the loss and the optimizer loop. It gets a dataset of ids and labels with preparation
switched off, so it never sees a text. Besides `trl_names`, which imports TRL, nothing else may know its names.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import get_peft_model_state_dict
from transformers import PrinterCallback, TrainerCallback

from turngate.trainer import trl_names
from turngate.trainer.lora import load_weights, lora_config
from turngate.trainer.publish import write_adapter
from turngate.trainer.sft_rows import SftRow
from turngate.trainer.sft_settings import SFT_METRICS, SftSettings
from turngate.trainer.token_losses import HardToken, TokenLosses
from turngate.trainer.tracking import EMBEDDED, SFT, Tracking, numbers
from turngate.trainer.trl_names import SFTTrainer
from turngate.trainer.untrained_rows import twins_of, untrained_alarm

OURS = {"mean_token_accuracy": "token_accuracy"}
"""TRL's name -> the name in metrics.jsonl, where it is another."""


class _Lines(TrainerCallback):
    """Writes a line a step, draws it as curves, and keeps the losses."""

    def __init__(self, path: Path, curves: Tracking, name: str, tokens: TokenLosses) -> None:
        self._path = path
        self._tokens = tokens
        self._name = name
        self._curves = curves
        self.losses: list[float] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if not logs or "loss" not in logs:
            return
        self.losses.append(float(logs["loss"]))
        named = {OURS.get(name, name): value for name, value in logs.items()}
        named["hardest_loss"] = self._tokens.hardest_loss(state.global_step - 1)
        line = {"step": state.global_step, **{name: named[name] for name in SFT_METRICS if name in named}}
        with self._path.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(line) + "\n")
        self._curves.log(self._name, numbers(line, "sft/"), state.global_step)

    def close(self) -> None:
        """Write what the curves still lack."""
        self._curves.close()


class RowTrainer(SFTTrainer):
    """TRL's trainer on a store's rows."""

    def __init__(self, settings: SftSettings, rows: Sequence[SftRow]) -> None:
        curves = Tracking(
            settings.run_folder or settings.output,
            settings.model_dump(mode="json"),
            wanted=EMBEDDED in settings.report_to,
        )
        steps = max(1, round(settings.epochs * len(rows) / settings.rows_per_step), math.ceil(settings.epochs))
        self.tokens = TokenLosses(rows, steps, settings.rows_per_step)
        self.lines = _Lines(settings.output / "metrics.jsonl", curves, settings.run_name or SFT, self.tokens)
        columns = {"input_ids": [list(row.ids) for row in rows], "labels": [list(row.labels) for row in rows]}
        super().__init__(
            model=settings.model,
            args=trl_names.sft_arguments(settings, steps),
            train_dataset=Dataset.from_dict(columns),
            peft_config=lora_config(settings, settings.model, settings.adapter),
            callbacks=[self.lines],
        )
        self.remove_callback(PrinterCallback)
        if settings.adapter is not None:
            load_weights(self.accelerator.unwrap_model(self.model), settings.adapter)
        model: Any = self.model
        head: Any = self.accelerator.unwrap_model(model).get_output_embeddings().weight
        self._twins = dict(
            zip(self.tokens.ids.tolist(), twins_of(head, torch.from_numpy(self.tokens.ids)), strict=True)
        )
        model.register_forward_hook(self._keep_losses, with_kwargs=True)

    def hardest(self) -> list[HardToken]:
        """The tokens that are the most improbable after training, of those that many rows have."""
        return self.tokens.hardest(self._text, self._twins)

    def untrained(self) -> str:
        """What to say, before any step, of tokens that many rows have and that no adapter can teach; mostly nothing."""
        return untrained_alarm({self._text(token): count for token, count in self._twins.items()})

    def _text(self, token: int) -> str:
        tokenizer: Any = self.processing_class
        return str(tokenizer.decode([token]))

    def _keep_losses(self, model: Any, args: Any, given: Mapping[str, Any], found: Any) -> None:
        """Of a training forward, each learnt token's loss: the log-probs are there, one a token."""
        if not model.training:
            return
        learnt = found.label_mask
        losses = -found.log_probs.detach()[learnt].float()
        self.tokens.add(self.state.global_step, given["labels"][:, 1:][learnt].cpu().numpy(), losses.cpu().numpy())

    def write(self, folder: Path) -> Path:
        """Write the adapter as RL and the engine read it."""
        model = self.accelerator.unwrap_model(self.model)
        return write_adapter(folder, get_peft_model_state_dict(model), model.peft_config["default"])
