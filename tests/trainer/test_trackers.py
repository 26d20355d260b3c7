"""What the trackers of the Trainer get: the numbers of each step, under the documented names, on this machine alone."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from tests.trainer.stub_gateway import KEY, StubGateway
from tests.trainer.test_training import metrics, start
from turngate.trainer.settings import ADMIN_KEY_VARIABLE
from turngate.trainer.step_log import METRICS

TRAINERS_OWN = {"epoch", "global_step"}


def test_trackio_has_every_step_under_the_documented_names(
    gateway: StubGateway, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ADMIN_KEY_VARIABLE, KEY)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    output = tmp_path / "run"
    process = start(gateway, tiny_model, output, 2, report_to=("trackio",), run_name="mine")
    assert process.wait(timeout=240) == 0, (output / "log").read_text()[-3000:]
    (file,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(file) as store:
        told = [(name, json.loads(text)) for name, text in store.execute("SELECT run_name, metrics FROM metrics")]
    assert {name for name, _ in told} == {"mine"}
    steps = [values for _, values in told if "train/reward_mean" in values]
    assert [values["train/reward_mean"] for values in steps] == [line["reward_mean"] for line in metrics(output)]
    names = {name.removeprefix("train/") for values in steps for name in values}
    assert names - TRAINERS_OWN <= METRICS.keys()
    assert {"entropy", "ratio_mean", "staleness_mean", "wait_s"} <= names
