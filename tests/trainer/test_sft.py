"""Supervised fine-tuning on a store's rows: the model sees exactly these tokens, learns them, RL goes on from there."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.proxy.store.samples import SampleStore, make_store
from tests.trainer.stub_gateway import KEY, StubGateway
from turngate.proxy.rows import build_rows
from turngate.proxy.store.turnstore import TurnStore
from turngate.trainer.settings import ADMIN_KEY_VARIABLE, TrainSettings
from turngate.trainer.sft import learn, sft_command
from turngate.trainer.sft_rows import NoRows, SftRow, export_rows, read_rows
from turngate.trainer.sft_seam import RowTrainer
from turngate.trainer.sft_settings import SftSettings
from turngate.trainer.train import train


@pytest.fixture
def sample(tmp_path: Path) -> SampleStore:
    """Two rollouts of rewards 0 and 1, two rows each."""
    return make_store(tmp_path / "store")


def settings_for(model: Path, sample: SampleStore, output: Path, **changed: Any) -> SftSettings:
    values = {
        "model": str(model),
        "store": sample.folder.path,
        "output": output,
        "device": "cpu",
        "threads": 2,
        "learning_rate": 1e-2,
        "epochs": 20,
        "rows_per_step": 2,
        "lora_targets": ("q_proj", "v_proj"),
    }
    return SftSettings.model_validate(values | changed)


def expected(sample: SampleStore) -> list[tuple[list[int], list[int]]]:
    """Ids and labels of the rows of the rollout with reward 1."""
    with TurnStore(sample.folder.turns(0), readonly=True) as store:
        rows = build_rows(store.turns(sample.rollouts[1]))
    return [(row.ids.tolist(), np.where(row.mask, row.ids, -100).tolist()) for row in rows]


def test_what_the_model_sees_is_exactly_the_stores_rows(sample: SampleStore, tiny_model: Path, tmp_path: Path) -> None:
    settings = settings_for(tiny_model, sample, tmp_path / "sft", epochs=1, rows_per_forward=2)
    rows = read_rows(export_rows(settings.store, settings.where, tmp_path / "rows.jsonl"), 8192).rows
    trainer = RowTrainer(settings, rows)
    seen: list[tuple[list[int], list[int]]] = []

    def watch(module: Any, args: Any, given: dict[str, Any]) -> None:
        kept = given["attention_mask"].bool()
        for ids, labels, real in zip(given["input_ids"], given["labels"], kept, strict=True):
            seen.append((ids[real].tolist(), labels[real].tolist()))
            assert (labels[~real] == -100).all()

    trainer.model.register_forward_pre_hook(watch, with_kwargs=True)
    trainer.train()
    assert sorted(seen) == sorted(expected(sample))


def test_it_learns_the_rows_and_writes_an_adapter_that_rl_begins_from(
    sample: SampleStore,
    gateway: StubGateway,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    summary = learn(settings_for(tiny_model, sample, tmp_path / "sft"))
    assert (summary["rows"], summary["tasks"], summary["steps"]) == (2, 1, 20)
    assert summary["loss_last"] < summary["loss_first"] - 0.2
    lines = [json.loads(line) for line in (tmp_path / "sft" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 21))
    adapter = tmp_path / "sft" / "adapter"
    monkeypatch.setenv(ADMIN_KEY_VARIABLE, KEY)
    settings = TrainSettings.model_validate(
        {
            "model": str(tiny_model),
            "gateway": gateway.url,
            "output": tmp_path / "rl",
            "adapter": adapter,
            "steps": 2,
            "token_budget": 40,
            "device": "cpu",
            "threads": 2,
            "learning_rate": 1e-3,
        }
    )
    assert train(settings, threading.Event()) == 0
    first, *more = gateway.versions
    assert (first.version, first.step) == (1, 0)
    assert [info.step for info in more] == [1, 2]
    begun, learnt = (
        load_file(Path(first.path) / "adapter_model.safetensors"),
        load_file(adapter / "adapter_model.safetensors"),
    )
    assert begun.keys() == learnt.keys()
    assert all(torch.equal(begun[name], learnt[name]) for name in learnt)
    metrics = [json.loads(line) for line in (tmp_path / "rl" / "metrics.jsonl").read_text().splitlines()]
    assert [line["held_version"] for line in metrics] == [1, 2]
    assert abs(metrics[0]["ratio_mean"] - 1) < 1e-3, "the engine's policy is the adapter that training began with"


def test_rows_that_do_not_fit_are_left_out_whole_and_counted(sample: SampleStore, tmp_path: Path) -> None:
    path = export_rows(sample.folder.path, "reward >= 0", tmp_path / "rows.jsonl")
    longest = max(len(json.loads(line)["ids"]) for line in path.read_text().splitlines())
    found = read_rows(path, longest - 1)
    assert found.left_out == {"longer than max_row_tokens": 2}
    assert len(found.rows) == 2
    with pytest.raises(NoRows, match="4 longer than max_row_tokens"):
        read_rows(path, 16 - 10)


def test_labels_are_the_masked_ids_and_nothing_else() -> None:
    row = SftRow("r", "t", (5, 6, 7), (-100, 6, 7))
    assert row.learnt_tokens == 2


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (["--where", "rewrd > 1"], 2, "unknown field 'rewrd'"),
        (["--where", "reward > 5"], 1, "no rollout is meant"),
        (["--rows-per-step", "3", "--rows-per-forward", "2"], 2, "no multiple"),
        (["--epochs", "0"], 2, "epochs"),
    ],
)
def test_wrong_usage_is_said(
    options: list[str],
    status: int,
    words: str,
    sample: SampleStore,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [str(sample.folder.path), "--model", "tiny", "--out", str(tmp_path / "sft"), *options]
    assert sft_command(given) == status
    assert words in capsys.readouterr().err
