"""A training run as the gateway sees it: which version the trainer holds, and what happens around each step.

The order after a step is fixed: acknowledge its groups, publish the adapter, write the step's record, seal the
checkpoint, tell the gateway it is durable. In the synchronous schedule the adapter is published first, so that whoever
sees a batch settled has its version. A crash between any two is repaired on resume; no version is ever reused.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from turngate.proxy import wire
from turngate.proxy.client import GatewayClient
from turngate.trainer import checkpoint, eval_log, probe
from turngate.trainer.errors import EngineLost, NeverFinite, NotFinite, PublishFailed
from turngate.trainer.finite import IN_A_ROW
from turngate.trainer.lease_source import LeaseSource
from turngate.trainer.planner import PlannedRow, StepPlan
from turngate.trainer.progress import read_metrics
from turngate.trainer.publish import canary, prune_adapters, publish, remove_drafts, write_adapter
from turngate.trainer.settings import TrainSettings
from turngate.trainer.step_log import StepLog, plan_metrics
from turngate.trainer.tracking import EMBEDDED, TRAIN, Tracking, numbers

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5


class Learner(Protocol):
    """What a run needs of the trainer that does the arithmetic."""

    model: Any

    @property
    def can_probe(self) -> bool:
        """Whether one process alone can run a forward (not when the model is spread over several)."""

    @property
    def spoilt(self) -> str:
        """Why the step in progress changed no weight, in words; empty when it did."""

    def lora_config(self) -> Any:
        """The adapter's PEFT configuration."""

    def score(self, row: PlannedRow) -> tuple[Tensor, Tensor]:
        """Recomputed and recorded log-probabilities of one row's trained tokens."""

    def step_metrics(self) -> dict[str, Any]:
        """What was measured in the step in progress."""


class Run:
    """State of one run in one process. `version` is the newest published one, `holds` whether the weights are its."""

    def __init__(
        self, settings: TrainSettings, client: GatewayClient, source: LeaseSource, state: checkpoint.RunState
    ) -> None:
        self.settings = settings
        self.client = client
        self.source = source
        self.version = state.version
        self.holds = state.holds
        self.resumed_step = state.step
        self.log = StepLog(settings.output / "metrics.jsonl")
        self.snapshots = probe.Snapshots(settings.max_staleness + 2)
        self._base_model = ""
        self._extra: dict[str, Any] = {}
        self._last_step_at = time.monotonic()
        self._effect_seen = False
        self._spoilt_in_a_row = 0
        self._evals_told = sum("eval/step" in line for line in read_metrics(self.log.path))
        self._curves = Tracking(
            settings.output, settings.model_dump(mode="json"), wanted=EMBEDDED in settings.report_to
        )

    def begin(self, learner: Learner, weights: dict[str, Tensor]) -> None:
        """Before the first step: find out what is routed to, and after a resume make it the weights held here.

        `weights` are the adapter's tensors under PEFT's names, here and below.
        """
        remove_drafts(self.settings.output / "adapters")
        info = self.source.patiently("reading the policy", lambda: self.client.policy(self.settings.policy))
        self._base_model = info.base_model
        if self.resumed_step > 0 and (info.version != self.version or not self.holds):
            log.info("version %d is routed to, the checkpoint holds %d: publishing it anew", info.version, self.version)
            self._publish(learner, weights, self.resumed_step)
        elif self.resumed_step == 0 and self.settings.adapter is not None:
            log.info("publishing %s as the version to begin with", self.settings.adapter)
            self._publish(learner, weights, 0)
            if not self.holds:
                raise PublishFailed(f"the adapter to begin with, {self.settings.adapter}, did not go live; see above")
        elif self.resumed_step == 0 and info.version != 0:
            log.warning(
                "version %d of %s is live but there is no checkpoint of it: publishing the base's weights anew",
                info.version,
                info.policy,
            )
            self._publish(learner, weights, 0)
        if self.holds:
            self.snapshots.add(self.version, weights)
        self._last_step_at = time.monotonic()

    def begin_step(self, learner: Learner, plan: StepPlan, weights: dict[str, Tensor]) -> None:
        """Before a step's first forward: when none of its rows came from the version held, compare an older one."""
        self._extra = {}
        rows = [row for row in plan.rows if row.tokens]
        if not learner.can_probe or (self.holds and any(row.sampled_by == self.version for row in rows)):
            return
        row = probe.comparable(rows, self.snapshots)
        if row is not None:
            found = probe.exactness_of(row, learner.model, weights, self.snapshots, learner.score)
            self._extra.update(found.metrics() if found is not None else {})

    def finish_step(
        self, learner: Learner, plan: StepPlan, weights: dict[str, Tensor], rows: dict[str, list[dict[str, Any]]]
    ) -> None:
        """After the optimizer step: settle its groups with their rows' statistics, publish the new weights.

        In the synchronous schedule in the other order: see this module's docstring.

        Raises:
            NeverFinite: the gradients of several steps in a row were not.
            NotFinite: the weights are not.
        """
        if learner.spoilt:
            self._pass_over(plan, learner.spoilt)
            self._extra.update(learner.step_metrics())
            return
        self._spoilt_in_a_row = 0
        if self.settings.schedule == "sync":
            self._publish(learner, weights, plan.step)
            self.source.trained(plan.groups, plan.step, rows)
        else:
            self.source.trained(plan.groups, plan.step, rows)
            self._publish(learner, weights, plan.step)
        if learner.can_probe and not self._effect_seen:
            row = min((row for row in plan.rows if row.tokens), key=lambda row: len(row.row.ids))
            effect = probe.adapter_effect(row, learner.model, learner.score)
            self._extra["canary/trainer_max_abs_dlogp"] = effect
            self._effect_seen = effect > 0
        self._extra.update(learner.step_metrics())

    def _pass_over(self, plan: StepPlan, why: str) -> None:
        """Drop the groups of a step whose gradients were not finite: the weights, and their version, stay."""
        self._spoilt_in_a_row += 1
        groups = ", ".join(group.id for group in plan.groups)
        log.error("step %d changed no weight: %s; its groups are dropped: %s", plan.step, why, groups)
        self.source.give_up(plan.groups, plan.step, NotFinite.cause)
        self._extra.update({"grad_norm": None, "groups": 0, "rows": 0, "tokens": 0})  # nothing of it was trained
        if self._spoilt_in_a_row >= IN_A_ROW:
            raise NeverFinite(
                f"{IN_A_ROW} steps in a row, the last is {plan.step}, had gradients that are not finite ({why}): "
                "lower learning_rate, or train in float32"
            )

    def record(self, plan: StepPlan, logs: dict[str, float]) -> dict[str, float]:
        """Write the step's line and curves; returns its numbers for the trackers of the Trainer."""
        now = time.monotonic()
        counts = self.source.take_counts()
        record = {
            "time": time.time(),
            **plan_metrics(plan),
            "grad_norm": logs.get("grad_norm"),
            "learning_rate": logs.get("learning_rate"),
            "zero_variance": counts.pop("zero_variance", 0),
            "settled": dict(counts),
            **self._extra,
            **self._evaluated(),
            "step_s": now - self._last_step_at,
        }
        self._last_step_at = now
        self.log.write(record)
        of_step = numbers(record, "")
        steps_own = {f"train/{name}": value for name, value in of_step.items() if name not in eval_log.EVAL_METRICS}
        self._curves.log(self.settings.run_name or TRAIN, steps_own, plan.step)
        return of_step

    def close(self) -> None:
        """Write what the curves still lack."""
        self._curves.close()

    def await_last_evaluation(self, stop: threading.Event) -> None:
        """After the last step, in every process: wait for the run's last evaluation where the launcher says so."""
        patience_s = self.settings.await_evaluation_s
        if patience_s is None:
            return
        self.source.stop()
        over, trained = (self.settings.output / name for name in (eval_log.OVER, eval_log.TRAINED))
        trained.parent.mkdir(parents=True, exist_ok=True)
        trained.touch()
        log.info("waiting for the last evaluation, to report it to %s", ", ".join(self.settings.report_to))
        give_up_s = time.monotonic() + patience_s
        while not over.exists() and not stop.is_set() and time.monotonic() < give_up_s:
            time.sleep(LOOK_EVERY_S)

    def untold_evaluations(self) -> list[dict[str, float]]:
        """The numbers of the evaluations that no step's record has, oldest first, for the trackers of the Trainer."""
        found = []
        while evaluated := self._evaluated():
            found.append(numbers(evaluated, ""))
        return found

    def _evaluated(self) -> dict[str, Any]:
        """The oldest evaluation that has ended and is in no step's record yet."""
        new = eval_log.read(self.settings.output)[self._evals_told :]
        self._evals_told += bool(new)
        return eval_log.eval_metrics(new[0]) if new else {}

    def seal(self, folder: Path, step: int) -> None:
        """Complete a written checkpoint and tell the gateway that `step` is durable."""
        lineage = {group: at for group, at in self.source.lineage.items() if at <= step}
        checkpoint.seal(folder, checkpoint.RunState(step, self.version, self.settings.policy, self.holds, lineage))
        self.declare_durable(folder, step)
        checkpoint.prune(folder.parent, self.settings.keep_checkpoints)

    def declare_durable(self, folder: Path, step: int) -> None:
        """Tell the gateway that acknowledgements up to `step` are final."""
        done = wire.DurableStep(policy=self.settings.policy, step=step, path=str(folder.resolve()))
        self.source.patiently(f"declaring step {step} durable", lambda: self.client.durable(done))

    def _publish(self, learner: Learner, weights: dict[str, Tensor], step: int) -> None:
        began = time.monotonic()
        parent = self.settings.output / "adapters"
        folder = write_adapter(_fresh(parent, step), weights, learner.lora_config())
        try:
            info = self.source.patiently(
                f"publishing step {step}",
                lambda: publish(
                    self.client, self.settings.policy, folder, step, max_staleness=self.settings.max_staleness
                ),
            )
        except (PublishFailed, EngineLost) as failure:
            log.error("%s; version %d stays routed to, training goes on", failure, self.version)
            self.holds = False
            self.source.counts["publication failed"] += 1
            return
        self.version, self.holds = info.version, True
        self.snapshots.add(info.version, weights)
        self._extra.update({"version": info.version, "publish_s": time.monotonic() - began})
        if any(tensor.any() for name, tensor in weights.items() if "lora_B" in name):
            self._check_engine(info)
        live = self.source.patiently("reading the policy", lambda: self.client.policy(self.settings.policy)).live
        prune_adapters(parent, self.settings.keep_adapters, [str(Path(a.path).resolve()) for a in live])

    def _check_engine(self, info: wire.AdapterInfo) -> None:
        if self.settings.engine_url is None:
            return
        prompt = [(17 * i) % 997 + 3 for i in range(32)]
        try:
            effect = canary(self.settings.engine_url, info.name, self._base_model, prompt)
        except PublishFailed as failure:
            log.warning("%s", failure)
            return
        self._extra["canary/engine_max_abs_dlogp"] = effect
        if effect == 0.0:
            log.error(
                "the engine answers %s with the base's log-probabilities: the adapter has no effect there", info.name
            )


def _fresh(parent: Path, step: int) -> Path:
    """A folder name for `step` that no earlier publication used, also not one before a resume."""
    at = 0
    while (folder := parent / f"step-{step:06d}-{at}").exists():
        at += 1
    return folder
