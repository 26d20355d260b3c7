"""The step log writes documented names only, one line a step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.trainer.make import RawTokens, simple_group
from turngate.trainer.exactness import Exactness
from turngate.trainer.losses import LossSums
from turngate.trainer.planner import plan_step
from turngate.trainer.step_log import METRICS, StepLog, plan_metrics


def test_a_line_is_whole_json_without_nan(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "deep" / "metrics.jsonl")
    log.write({"step": 1, "loss": float("nan"), "grad_norm": float("inf")})
    log.write({"step": 2, "loss": 0.5})
    lines = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert lines == [{"step": 1, "loss": None, "grad_norm": None}, {"step": 2, "loss": 0.5}]


def test_a_name_without_documentation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="mystery"):
        StepLog(tmp_path / "m").write({"mystery": 1})


def test_every_source_of_metrics_uses_documented_names() -> None:
    plan = plan_step([simple_group("g", [0.0, 1.0])], step=3, version=0, max_staleness=1, new_bin=lambda: RawTokens(99))
    names = {*plan_metrics(plan), *LossSums().means(), *Exactness(1, 1, 1, 1.0, 0.0, 0.0).metrics()}
    assert names <= METRICS.keys()
    assert plan_metrics(plan)["reward_mean"] == 0.5
