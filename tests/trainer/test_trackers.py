"""The curves of a run: real trackio, in the run's own folder, on this machine alone; read back from its database."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.proxy.store.samples import make_store
from tests.trainer.stub_gateway import KEY, StubGateway
from tests.trainer.test_training import metrics, start, wait_for_step
from turngate.trainer import tracking
from turngate.trainer.launch_config import Places, evaluator_settings, parse, trainer_settings
from turngate.trainer.settings import ADMIN_KEY_VARIABLE
from turngate.trainer.sft_settings import SFT_METRICS
from turngate.trainer.step_log import METRICS
from turngate.trainer.tracking import FOLDER_VARIABLE, how_to_look, numbers
from turngate.trainer.warm_start import sft_settings

Points = dict[str, list[tuple[int, dict[str, float]]]]


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a writable home, with a token of the hub that must not be shown to anyone."""
    monkeypatch.setenv(ADMIN_KEY_VARIABLE, KEY)
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.setenv("HOME", "/dev/null/home")
    monkeypatch.setenv("HF_HOME", "/dev/null/home/hf")
    monkeypatch.setenv("HF_TOKEN", "hf_" + "x" * 34)


def points(project: Path) -> Points:
    """Every point of a project by run, and that each name is one run."""
    (file,) = (project / "trackio").glob("*.db")
    assert file.stem == project.name
    found: Points = defaultdict(list)
    ids = defaultdict(set)
    with sqlite3.connect(file) as store:
        for run, name, step, text in store.execute("SELECT run_id, run_name, step, metrics FROM metrics ORDER BY id"):
            found[name].append((step, json.loads(text)))
            ids[name].add(run)
        assert store.execute("SELECT count(*) FROM system_metrics").fetchone() == (0,)
    assert all(len(runs) == 1 for runs in ids.values())
    return dict(found)


def test_every_step_is_a_point_under_the_documented_names_and_a_resumed_run_goes_on_in_the_same(
    gateway: StubGateway, tiny_model: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    process = start(gateway, tiny_model, output, 50)
    wait_for_step(output, 2, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=240) == 130, (output / "log").read_text()[-3000:]
    done = metrics(output)[-1]["step"]
    process = start(gateway, tiny_model, output, done + 2)
    assert process.wait(timeout=240) == 0, (output / "log").read_text()[-3000:]
    (steps,) = points(output).values()
    assert [step for step, _ in steps] == list(range(1, done + 3))
    assert [values["train/reward_mean"] for _, values in steps] == [line["reward_mean"] for line in metrics(output)]
    names = {name.removeprefix("train/") for _, values in steps for name in values}
    assert {name for name in names if not name.startswith("settled/")} <= METRICS.keys() - {"step", "time", "settled"}
    assert {"loss", "entropy", "ratio_mean", "staleness_mean", "wait_s", "learning_rate"} <= names


def test_a_fine_tuning_has_its_own_run_in_the_project_of_the_launch(tiny_model: Path, tmp_path: Path) -> None:
    sample, launched = make_store(tmp_path / "store"), tmp_path / "demo-1"
    words = [str(sample.folder.path), "--model", str(tiny_model), "--out", str(launched / "warm_start")]
    words += ["--run-folder", str(launched), "--device", "cpu", "--threads", "2", "--rows-per-step", "1"]
    code = "import sys; from turngate.trainer.sft import sft_command; sys.exit(sft_command(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    (steps,) = points(launched).values()
    lines = [json.loads(line) for line in (launched / "warm_start" / "metrics.jsonl").read_text().splitlines()]
    assert [(step, values["sft/loss"]) for step, values in steps] == [(line["step"], line["loss"]) for line in lines]
    names = {f"sft/{name}" for name in SFT_METRICS.keys() - {"step"}}
    rare = {"sft/hardest_loss"}  # two rows have no id often enough
    assert all(values.keys() == names - rare for _, values in steps)
    assert json.loads(done.stdout)["steps"] == len(steps), "standard output is the summary alone"


def test_where_trackio_is_not_installed_a_run_goes_on_without_it_and_says_so_once(
    gateway: StubGateway, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "run"
    hide_trackio(tmp_path, monkeypatch)
    process = start(gateway, tiny_model, output, 2)
    assert process.wait(timeout=240) == 0, (output / "log").read_text()[-3000:]
    assert [line["step"] for line in metrics(output)] == [1, 2]
    assert not (output / "trackio").exists()
    assert (output / "log").read_text().count("trackio is not installed") == 1


@pytest.mark.parametrize("how", ["turned off", "not installed", "folder cannot be written", "database is torn"])
def test_whatever_fails_is_said_once_and_never_reaches_the_run(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "run"
    if how == "not installed":
        hide_trackio(tmp_path, monkeypatch)
    if how == "folder cannot be written":
        monkeypatch.setenv(FOLDER_VARIABLE, "/dev/null/trackio")
    if how == "database is torn":
        (output / "trackio").mkdir(parents=True)
        (output / "trackio" / "run.db").write_bytes(b"no database" * 500)
    code = f"""if True:
        import logging, sys
        from pathlib import Path
        from turngate.trainer.tracking import Tracking
        logging.basicConfig(level=logging.INFO)
        curves = Tracking(Path({str(output)!r}), {{"why": "test"}}, wanted={how != "turned off"})
        for step in (1, 2, 3):
            curves.log("train", {{"train/loss": 0.5}}, step)
        curves.close()
        print("trackio" in sys.modules)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{how == 'database is torn'}\n"
    if how == "database is torn":
        assert "file is not a database" in done.stderr
    else:
        assert done.stderr.count("WARNING") == (how != "turned off"), done.stderr


def hide_trackio(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were not installed, in every interpreter started from here on."""
    (folder / "hidden").mkdir()
    (folder / "hidden" / "sitecustomize.py").write_text(HIDE_TRACKIO)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder / "hidden"), os.environ.get("PYTHONPATH", "")]))


HIDE_TRACKIO = """
from importlib.machinery import PathFinder

found = PathFinder.find_spec
PathFinder.find_spec = staticmethod(lambda name, *more: None if name.split(".")[0] == "trackio" else found(name, *more))
"""


def test_the_launchers_parts_share_one_project_and_one_setting(tmp_path: Path) -> None:
    raw: dict[str, Any] = {"model": "m", "run": {}, "train": {}, "warm_start": {"demonstrations": {}}}
    places = Places("http://g", tmp_path / "key", tmp_path / "run", "m", "http://e")
    for changed, expected in (({}, ("trackio",)), ({"report_to": []}, ()), ({"report_to": ["wandb"]}, ("wandb",))):
        config = parse({**raw, "train": changed})
        train = trainer_settings(config, places)
        assert config.warm_start is not None
        sft = sft_settings(train, config.warm_start, places.store, tmp_path / "run" / "warm_start")
        parts = (train, sft, evaluator_settings(config, places))
        assert [part.report_to for part in parts] == [expected] * 3
        assert sft.run_folder == train.output == parts[2].output


def test_numbers_are_finite_and_go_without_the_steps_own_place() -> None:
    record = {"step": 3, "time": 9.0, "loss": 0.5, "kl": float("nan"), "version": None, "settled": {"too long": 2}}
    assert numbers(record, "train/") == {"train/loss": 0.5, "train/settled/too long": 2}


def test_how_to_look_is_a_command_that_works_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a run"
    folder.mkdir()
    words = how_to_look(folder)
    assert words.startswith(f"{FOLDER_VARIABLE}='{folder}/trackio' ")
    assert words.endswith("show --project 'a run'")
    shown = subprocess.run(f"{words} --help", shell=True, capture_output=True, text=True, check=True)
    assert "--project" in shown.stdout
    monkeypatch.setattr(tracking, "is_installed", lambda: False)
    assert "not installed" in how_to_look(folder)
