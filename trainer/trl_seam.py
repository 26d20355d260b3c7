"""The seam with TRL: its async GRPO trainer, fed by step plans and publishing through the gateway.

TRL keeps model set-up, the prefix tree, the optimizer loop, FSDP2, checkpoints and logging; planner, loss, attention
and publication are ours. Besides `trl_names`, which imports TRL, nothing else may know its names.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset
from peft import LoraConfig, get_peft_model_state_dict
from torch import Tensor
from transformers import AttentionInterface, PrinterCallback, TrainerCallback

from turngate.trainer import checkpoint, trl_names
from turngate.trainer.attention import KernelTree, SdpaTree, SizedTree, Tree, TreeAttention, choose
from turngate.trainer.exactness import ExactnessSums
from turngate.trainer.finite import spoilt_gradient
from turngate.trainer.lease_source import LeaseSource
from turngate.trainer.loader import PlanLoader, PlanTerms
from turngate.trainer.lora import load_weights, lora_config
from turngate.trainer.losses import LossSums, base_divergence, step_loss
from turngate.trainer.planner import PlannedRow, StepPlan
from turngate.trainer.run import Run
from turngate.trainer.settings import TrainSettings
from turngate.trainer.trl_names import AsyncGRPOTrainer, packing
from turngate.trainer.whole_rows import Padded, RowBin, WholeRows

NO_VERSION = -2


class TreeBin:
    """A planner's bin that counts a shared prefix once: TRL's prefix tree."""

    def __init__(self, token_budget: int) -> None:
        self.token_budget = token_budget
        self._tree = packing.TreeRow()

    def fits(self, row: PlannedRow) -> bool:
        """Whether the tree stays within the budget with `row` added."""
        return bool(self._tree.fits(_sample(row), self.token_budget))

    def add(self, row: PlannedRow) -> None:
        """Grow the tree."""
        self._tree.add(_sample(row))


@dataclass(frozen=True, slots=True)
class Packed:
    """One forward of one rank: TRL's packed tree tensors, and which of its samples each loss term came from."""

    rows: tuple[PlannedRow, ...]
    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, rows: Sequence[PlannedRow], device: torch.device) -> Packed:
        """Pack `rows` into one prefix tree on `device`."""
        tree = packing.TreeRow()
        for row in rows:
            tree.add(_sample(row))
        return cls(tuple(rows), {name: tensor.to(device) for name, tensor in tree.pack().items()})

    @property
    def forwarded_tokens(self) -> int:
        """Tokens in the packed forward."""
        return int(self.tensors["input_ids"].numel())

    def inputs(self, attention: TreeAttention) -> dict[str, Any]:
        """The model's arguments, with what all layers share."""
        t = self.tensors
        tree = Tree(t["tree_kv_index"], t["tree_cu_seqlens_q"], t["tree_cu_seqlens_k"], t["position_ids"])
        own = {name: t[name][None] for name in ("input_ids", "position_ids", "shift_labels")}
        return {**own, **attention.prepare(tree)}


class NoTransfer:
    """TRL's weight transfer, doing nothing: adapters are published through the gateway, base weights never move."""

    def init_weight_transfer(self) -> None:
        """Nothing to set up."""

    def pause(self) -> None:
        """Generation never pauses."""

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        """Nothing is sent."""

    def resume(self) -> None:
        """Nothing was paused."""

    def destroy(self) -> None:
        """Nothing to release."""


class _StopWhenAsked(TrainerCallback):
    """Ends training after the step in progress once `stop` is set; a step without a checkpoint gets one."""

    def __init__(self, stop: threading.Event) -> None:
        self.stop = stop

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.stop.is_set():
            control.should_training_stop = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.stop.is_set():
            control.should_training_stop = True
            sealed = checkpoint.folder_of(Path(args.output_dir), state.global_step) / checkpoint.MARKER
            control.should_save = state.global_step > 0 and not sealed.exists()


class _TellLastEvaluations(TrainerCallback):
    """After the last step, while the trackers are still open: hands them the evaluations that no step's record has."""

    def __init__(self, trainer: GatewayTrainer) -> None:
        self.trainer = trainer

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step < state.max_steps:
            return
        self.trainer.run.await_last_evaluation(self.trainer.stop_asked)
        if self.trainer.accelerator.is_main_process:
            for found in self.trainer.run.untold_evaluations():
                self.trainer.log(found)


class GatewayTrainer(AsyncGRPOTrainer):
    """TRL's async GRPO trainer with whole-step plans, an exact token mean and adapters published by the gateway."""

    def __init__(self, settings: TrainSettings, run: Run, source: LeaseSource | None, stop: threading.Event) -> None:
        self.settings = settings
        self.run = run
        self.stop_asked = stop
        self.lease_source = source
        self._sums = LossSums()
        self._exact = ExactnessSums(0)
        self._plan: StepPlan | None = None
        self._forwarded_tokens = 0
        self._train_s = 0.0
        self.spoilt = ""
        self._row_stats: dict[str, list[dict[str, Any]]] = {}
        self.other_layers = trl_names.other_layers(settings.model)
        self._pack = Padded.of if self.other_layers else Packed.of
        with (
            trl_names.peak_flops_without_cuda(),
            trl_names.any_layers() if self.other_layers else contextlib.nullcontext(),
        ):
            super().__init__(
                model=settings.model,
                args=trl_names.arguments(settings),
                train_dataset=Dataset.from_dict({"prompt": [""]}),
                peft_config=lora_config(settings, settings.model, settings.adapter),
                rollout_worker=source or _NoWorker(),
                weight_transfer=NoTransfer(),
                callbacks=[_StopWhenAsked(stop)],
            )
        self.remove_callback(PrinterCallback)
        self.add_callback(_TellLastEvaluations(self))
        if settings.adapter is not None:
            load_weights(self.accelerator.unwrap_model(self.model), settings.adapter)
        self.attention_refused: Mapping[str, str] = {}
        if self.other_layers:
            self.attention: Any = WholeRows()
            self.attention_refused = {"tree": f"the model has {', '.join(self.other_layers)} layers"}
        else:
            self.attention = self._choose_attention()
            AttentionInterface.register(packing.TREE_ATTENTION, self.attention)

    def lora_weights(self) -> dict[str, Tensor]:
        """The adapter's tensors under PEFT's names, gathered where sharded."""
        weights = get_peft_model_state_dict(self.accelerator.unwrap_model(self.model))
        return {name: t.full_tensor() if hasattr(t, "full_tensor") else t.detach() for name, t in weights.items()}

    def lora_config(self) -> LoraConfig:
        """The adapter's PEFT configuration."""
        return self.accelerator.unwrap_model(self.model).peft_config["default"]

    @property
    def can_probe(self) -> bool:
        """Whether this process alone can run a forward."""
        return self.accelerator.num_processes == 1

    def get_train_dataloader(self) -> PlanLoader:
        """Step plans instead of TRL's single samples."""
        ranks = self.accelerator.num_processes
        self.plan_loader = PlanLoader(
            self.lease_source if self.accelerator.is_main_process else None,
            PlanTerms(
                self.settings.groups_per_step,
                self.settings.max_staleness,
                self.settings.idle_timeout_s,
                ranks,
                whole_batches=self.settings.schedule == "sync",
            ),
            where=lambda: (self.state.global_step, self.run.version),
            new_bin=lambda: (RowBin if self.other_layers else TreeBin)(self.settings.token_budget),
            stop=self.stop_asked,
            share=(lambda plan: broadcast_object_list([plan])[0]) if ranks > 1 else (lambda plan: plan),
        )
        return self.plan_loader

    def training_step(self, model: Any, inputs: dict[str, StepPlan], num_items_in_batch: Any = None) -> Tensor:
        """All micro-batches of one plan; gradients are exchanged with the last one only.

        A step whose gradient is not finite changes nothing: `spoilt` says why.
        """
        began, plan = time.perf_counter(), inputs["plan"]
        model.train()
        self._begin_step(plan)
        rank, last = self.accelerator.process_index, len(plan.micro) - 1
        total = torch.zeros((), device=self.accelerator.device)
        for index, ranks in enumerate(plan.micro):
            packed = self._pack(ranks[rank], self.accelerator.device)
            together = contextlib.nullcontext() if index == last else self.accelerator.no_sync(model)
            with together:
                loss = self.compute_loss(model, packed)
                self.accelerator.backward(loss)
            total += loss.detach()
        self._sums.loss = float(total) / self.accelerator.num_processes
        self.spoilt = spoilt_gradient(model)
        if self.spoilt:
            model.zero_grad(set_to_none=True)  # an optimizer leaves weights without a gradient as they are
        self._train_s = time.perf_counter() - began
        return total

    def compute_loss(
        self, model: Any, inputs: Packed | Padded, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """One micro-batch's share of the step's loss, scaled so that DDP's mean over ranks is the step's token mean."""
        assert self._plan is not None
        logprobs, entropy = self.logprobs(model, inputs)
        recorded, advantages = inputs.tensors["old_log_probs"], inputs.tensors["advantages"]
        loss = step_loss(logprobs, recorded, advantages, step_tokens=self._plan.tokens, settings=self.settings.loss)
        self._sums.add(logprobs.detach(), recorded, advantages, entropy.detach(), self.settings.loss)
        if self.settings.kl_coefficient:
            divergence = base_divergence(logprobs, self.base_logprobs(model, inputs))
            loss = loss + self.settings.kl_coefficient * divergence.sum() / max(self._plan.tokens, 1)
            self._sums.add_base(divergence.detach())
        self._forwarded_tokens += inputs.forwarded_tokens
        self._count_rows(inputs, logprobs.detach())
        return loss * self.accelerator.num_processes

    def logprobs(self, model: Any, packed: Packed | Padded) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of a forward's trained tokens: two `float[M]`, with gradient."""
        out = model(**packed.inputs(self.attention), fused_lm_head=True)
        index = packed.tensors["token_index"]
        return out.log_probs.flatten()[index], out.entropy.flatten()[index]

    @torch.no_grad()
    def base_logprobs(self, model: Any, packed: Packed | Padded) -> Tensor:
        """The same tokens' log-probabilities with the adapter off: `float[M]`."""
        inner = self.accelerator.unwrap_model(model)
        with inner.disable_adapter():
            return self.logprobs(inner, packed)[0]

    @torch.no_grad()
    def score(self, row: PlannedRow) -> tuple[Tensor, Tensor]:
        """Recomputed and recorded log-probabilities of one row's trained tokens, two `float[M]`."""
        packed = self._pack([row], self.accelerator.device)
        return self.logprobs(self.model, packed)[0], packed.tensors["old_log_probs"]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Write the step's record, and hand the numbers to the Trainer's trackers."""
        if self.spoilt:
            logs.pop("grad_norm", None)  # the norm of no gradient, 0
        if self._plan is not None and self.accelerator.is_main_process:
            logs.update(self.run.record(self._plan, logs))
            self._plan = None
        super().log(logs, start_time)

    def _begin_step(self, plan: StepPlan) -> None:
        self._plan, self._sums, self._forwarded_tokens, self._row_stats = plan, LossSums(), 0, {}
        self._exact = ExactnessSums(self.run.version if self.run.holds else NO_VERSION)
        weights = self.lora_weights()
        if self.accelerator.is_main_process:
            self.run.begin_step(self, plan, weights)

    def _count_rows(self, packed: Packed | Padded, logprobs: Tensor) -> None:
        recorded, sample = packed.tensors["old_log_probs"], packed.tensors["segment_id"]
        for index, row in enumerate(packed.rows):
            if row.tokens == 0:
                continue
            mine, theirs = logprobs[sample == index], recorded[sample == index]
            if row.sampled_by == self._exact.version:
                self._exact.add(mine, theirs, rows=1)
            self._row_stats.setdefault(row.row.group, []).append(
                {
                    "rollout": row.row.rollout,
                    "turns": list(row.row.turns),
                    "advantage": row.row.advantage,
                    "trained_tokens": row.tokens,
                    "stale_tokens": row.stale_tokens,
                    "version": row.sampled_by,
                    "ratio_mean": float((mine - theirs).double().exp().mean()),
                }
            )

    def _sync_weight(self) -> None:
        """TRL calls this once before training and after each optimizer step.

        All processes gather the weights and their counts; the first one talks to the gateway and tells the others which
        version they hold now.
        """
        weights = self.lora_weights()
        if self._plan is not None:
            self._gather_counts()
        if self.accelerator.is_main_process:
            if self._plan is None:
                self.run.begin(self, weights)
            else:
                self.run.finish_step(self, self._plan, weights, self._row_stats)
        if self.accelerator.num_processes > 1:
            self.run.version, self.run.holds = broadcast_object_list([self.run.version, self.run.holds])

    def _gather_counts(self) -> None:
        """Bring the sums and the rows' statistics of all processes to each of them."""
        if self.accelerator.num_processes == 1:
            return
        mine = (self._sums, self._exact, self._forwarded_tokens, self._row_stats)
        parts = gather_object([mine])
        self._sums = sum((part[0] for part in parts[1:]), parts[0][0])
        self._exact = sum((part[1] for part in parts[1:]), parts[0][1])
        self._forwarded_tokens = sum(part[2] for part in parts)
        self._row_stats = {}
        for _, _, _, stats in parts:
            for group, rows in stats.items():
                self._row_stats.setdefault(group, []).extend(rows)

    def _log_step_metrics(self) -> None:
        """TRL's own step accounting; ours is in the step log."""

    def step_metrics(self) -> dict[str, Any]:
        """What this process measured in the step in progress."""
        exact = self._exact.result()
        return {
            "loss": self._sums.loss,
            "forwarded_tokens": self._forwarded_tokens,
            "train_s": self._train_s,
            "wait_s": self.plan_loader.wait_s,
            **self._sums.means(),
            **(exact.metrics() if exact is not None else {}),
        }

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """The Trainer's checkpoint, sealed; then the gateway is told that its step is durable."""
        folder = checkpoint.folder_of(Path(self.args.output_dir), self.state.global_step)
        if self.accelerator.is_main_process:
            checkpoint.discard(folder)
        self.accelerator.wait_for_everyone()
        super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            self.run.seal(folder, self.state.global_step)

    def _choose_attention(self) -> TreeAttention:
        device = self.accelerator.device

        def by_size() -> TreeAttention:
            return SizedTree(device=device, dtype=self.model.dtype)

        candidates = [_flash_attention, by_size] if device.type == "cuda" else [SdpaTree]
        attention, self.attention_refused = choose(candidates, device=device, dtype=self.model.dtype)
        return attention


class _NoWorker:
    """Stands in for the lease source in processes that do not lease."""

    rollout_buffer: Any = None
    metrics_queue: Any = None


def _sample(row: PlannedRow) -> dict[str, Any]:
    """A planned row as TRL's packing wants it."""
    return {
        "input_ids": row.row.ids,
        "completion_mask": row.mask,
        "old_log_probs": row.row.logprobs,
        "advantage": row.row.advantage,
        "group_id": row.row.group,
    }


def _flash_attention() -> TreeAttention:
    packing._flash_attn()
    return KernelTree(packing.tree_attention)
