"""One JSON line a step in `metrics.jsonl`: what the launcher's progress reads and what a curve is drawn from.

Every name written is listed with its meaning in `METRICS`; a test compares the two. It only appends, one write a line,
so a reader never sees half a step followed by another.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from turngate.trainer.eval_log import EVAL_METRICS
from turngate.trainer.planner import StepPlan

METRICS: dict[str, str] = {
    "step": "optimizer steps done, this one included",
    "time": "UTC seconds when the step was done",
    "loss": "negative clipped surrogate, mean over the step's trained tokens",
    "grad_norm": "norm of the gradient before clipping; null where it was not finite: such a step changes no weight",
    "learning_rate": "of this step",
    "reward_mean": "mean reward of the scored rollouts of the step's groups",
    "reward_std": "their standard deviation",
    "groups": "groups trained in this step",
    "rows": "rows trained in this step",
    "micro_batches": "forward passes the step was split into",
    "tokens": "tokens trained in this step",
    "forwarded_tokens": "tokens of the step's packed forwards, shared prefixes once",
    "staleness_mean": "versions the trained tokens lag behind the trainer, mean",
    "staleness_max": "the same, largest",
    "stale_tokens": "tokens not trained because they were older than max_staleness, in groups dropped for it too",
    "ratio_mean": "mean of pi/mu over the trained tokens",
    "kl": "k3 estimate of KL(mu || pi) over the trained tokens",
    "kl_base": "k3 estimate of KL(pi || base) over the trained tokens, when kl_coefficient is above 0",
    "entropy": "mean entropy of the next-token distribution at trained tokens, in nats",
    "clip_fraction": "share of trained tokens whose gradient is clipped away",
    "truncated_fraction": "share of trained tokens whose weight reached is_cap",
    "zero_variance": "groups passed over since the last step because all rewards were equal",
    "settled": "everything else counted since the last step, by cause",
    "held_version": "policy version whose weights the trainer held while computing this step",
    "version": "policy version published after this step",
    "wait_s": "seconds the step waited for its groups",
    "train_s": "seconds of forward and backward",
    "publish_s": "seconds until the new version was live",
    "step_s": "seconds from the step before to this one",
    "exact/version": "version whose rows were compared with the engine's record",
    "exact/rows": "rows compared",
    "exact/tokens": "tokens compared",
    "exact/ratio_mean": "mean of recomputed over recorded probability on those rows",
    "exact/max_abs_dlogp": "largest absolute difference of log-probabilities on those rows",
    "exact/mean_abs_dlogp": "mean absolute difference of log-probabilities on those rows",
    "canary/trainer_max_abs_dlogp": "largest difference between base and adapter in the trainer, on one row",
    "canary/engine_max_abs_dlogp": "the same asked of the engine, when engine_url is set",
}


METRICS |= EVAL_METRICS


class StepLog:
    """Appends step records to `path`; keeps the last one in `last`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last: dict[str, Any] = {}
        path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one step. Numbers that JSON lacks (nan, inf) become null.

        Raises:
            KeyError: a name is not documented in `METRICS`.
        """
        unknown = record.keys() - METRICS.keys()
        if unknown:
            raise KeyError(f"metrics without documentation: {sorted(unknown)}; add them to METRICS")
        self.last = {name: _plain(value) for name, value in record.items()}
        with self.path.open("a+b") as file:
            if file.tell():
                file.seek(-1, 2)
            cut = file.read(1) not in (b"", b"\n")  # by a kill
            file.write(b"\n" * cut + json.dumps(self.last).encode() + b"\n")


def plan_metrics(plan: StepPlan) -> dict[str, Any]:
    """The part of a step's record that follows from its plan."""
    rewards = np.asarray(plan.rewards, dtype=np.float64)
    return {
        "step": plan.step,
        "reward_mean": float(rewards.mean()) if len(rewards) else None,
        "reward_std": float(rewards.std()) if len(rewards) else None,
        "groups": len(plan.groups),
        "rows": sum(row.tokens > 0 for row in plan.rows),
        "micro_batches": len(plan.micro),
        "tokens": plan.tokens,
        "staleness_mean": plan.staleness.mean,
        "staleness_max": plan.staleness.max,
        "stale_tokens": plan.staleness.dropped_tokens,
        "held_version": plan.version,
    }


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
