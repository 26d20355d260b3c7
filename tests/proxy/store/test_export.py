"""What is exported is what is stored, `datasets` reads it, and no secret is in it."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from tokenizers import Tokenizer, models

from tests.proxy.store.samples import SampleStore, make_store, make_turn
from turngate.proxy import wire
from turngate.proxy.rows import build_rows
from turngate.proxy.store.control import ControlStore
from turngate.proxy.store.export import export_command
from turngate.proxy.store.turnstore import TurnStore
from turngate.proxy.turns import by_id, prompt_ids

SECRET = "tg-" + "ab12" * 12


@pytest.fixture
def sample(tmp_path: Path) -> SampleStore:
    return make_store(tmp_path / "run" / "store")


def exported(sample: SampleStore, tmp_path: Path, *options: str, name: str = "out.jsonl") -> list[dict[str, Any]]:
    out = tmp_path / name
    assert export_command([str(sample.folder.path), "--out", str(out), *options]) == 0
    return [orjson.loads(line) for line in out.read_bytes().splitlines()]


def load(kind: str, path: Path, tmp_path: Path) -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.load_dataset(kind, data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))


def test_rows_are_those_a_trainer_gets(sample: SampleStore, tmp_path: Path) -> None:
    lines = exported(sample, tmp_path)
    with TurnStore(sample.folder.turns(0), readonly=True) as store:
        rows = [row for rollout in sample.rollouts for row in build_rows(store.turns(rollout))]
    assert len(lines) == len(rows) == 4
    for line, row in zip(lines, rows, strict=True):
        assert (line["rollout"], line["turns"], line["label"]) == (row.rollout, list(row.turns), "main")
        assert line["ids"] == row.ids.tolist()
        assert line["mask"] == row.mask.tolist()
        assert np.asarray(line["logprobs"], np.float32).tobytes() == row.logprobs.tobytes()
        assert line["versions"] == row.versions.tolist()
        assert (line["task"], line["group"], line["group_state"], line["trained_in_step"]) == (
            *("count", "group-0"),
            *("trained", 1),
        )


def test_turns_have_their_whole_prompt_and_messages_unless_compact(sample: SampleStore, tmp_path: Path) -> None:
    lines = exported(sample, tmp_path, "--what", "turns")
    with TurnStore(sample.folder.turns(0), readonly=True) as store:
        known = by_id(store.turns("rollout-0"))
    second = lines[1]
    assert second["prompt_ids"] == prompt_ids(known, known["rollout-0-turn-1"]).tolist()
    assert [message["role"] for message in orjson.loads(second["messages"])] == ["user", "assistant", "user"]
    compact = exported(sample, tmp_path, "--what", "turns", "--compact")[1]
    assert "prompt_ids" not in compact
    assert len(orjson.loads(compact["messages"])) == 1


@pytest.mark.parametrize("what", ["rows", "turns", "rollouts"])
def test_datasets_reads_both_formats_alike(sample: SampleStore, tmp_path: Path, what: str) -> None:
    lines = exported(sample, tmp_path, "--what", what)
    parquet = tmp_path / "out.parquet"
    assert export_command([str(sample.folder.path), "--what", what, "--out", str(parquet)]) == 0
    from_json, from_parquet = load("json", tmp_path / "out.jsonl", tmp_path), load("parquet", parquet, tmp_path)
    assert from_json.num_rows == from_parquet.num_rows == len(lines)
    assert set(from_json.column_names) == set(from_parquet.column_names) == set(lines[0])
    for line, read in zip(lines, from_parquet, strict=True):
        assert {key: value for key, value in read.items() if key != "logprobs"} == {
            key: value for key, value in line.items() if key != "logprobs"
        }


def test_filters_choose_rollouts_and_labels(sample: SampleStore, tmp_path: Path) -> None:
    assert {line["rollout"] for line in exported(sample, tmp_path, "--min-reward", "0.5")} == {"rollout-1"}
    assert exported(sample, tmp_path, "--what", "turns", "--label", "side") == []
    assert len(exported(sample, tmp_path, "--what", "rollouts", "--outcome", "scored")) == 2
    assert exported(sample, tmp_path, "--what", "rollouts", "--task", "other") == []


def test_text_comes_from_the_runs_own_tokenizer(
    sample: SampleStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export_command([str(sample.folder.path), "--text", "--out", str(tmp_path / "x.jsonl")]) == 1
    assert "was not kept" in capsys.readouterr().err
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(1000)}, unk_token="w0"))
    words.save(str(sample.folder.tokenizer))
    line = exported(sample, tmp_path, "--text")[0]
    assert line["text"] == " ".join(f"w{token}" for token in line["ids"])


def test_no_secret_is_exported(sample: SampleStore, tmp_path: Path) -> None:
    messages = [{"role": "tool", "content": f"OPENAI_BASE_URL=http://127.0.0.1:1/s/{SECRET}/v1"}]
    with ControlStore(sample.folder.control) as control, TurnStore(sample.folder.turns(0)) as turns:
        digest = hashlib.sha256(SECRET.encode()).digest()
        control.create_rollout("zz", digest, wire.NewRollout(task="t", metadata={"key": SECRET}), "policy", 0, 99)
        turns.commit([make_turn("zz", 0, request={"messages": messages, "tools": None, "params": {}})])
    for what in ("rows", "turns", "rollouts"):
        exported(sample, tmp_path, "--what", what)
        text = (tmp_path / "out.jsonl").read_text()
        assert "zz" in text
        assert SECRET not in text
        assert digest.hex() not in text


def test_wrong_usage_and_missing_stores_have_their_status(
    sample: SampleStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export_command([str(tmp_path / "nowhere"), "--out", "x.jsonl"]) == 2
    for wrong in (["--out", "x.csv"], ["--out", "-", "--format", "parquet"], []):
        with pytest.raises(SystemExit) as leaving:
            export_command([str(sample.folder.path), *wrong])
        assert leaving.value.code == 2
    assert export_command([str(sample.folder.path), "--out", "-"]) == 0
    assert all(json.loads(line) for line in capsys.readouterr().out.splitlines()), "standard output gets JSON lines"
    in_a_file = tmp_path / "file" / "x.jsonl"
    in_a_file.parent.write_text("not a folder")
    assert export_command([str(sample.folder.path), "--out", str(in_a_file)]) == 1
    assert "turngate export" in capsys.readouterr().err


def test_parquet_without_pyarrow_says_what_to_install(sample: SampleStore, tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['pyarrow'] = None;"
        "from turngate.proxy.store.export import export_command;"
        f"sys.exit(export_command([{str(sample.folder.path)!r}, '--out', {str(tmp_path / 'x.parquet')!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'turngate[export]'" in done.stderr
    assert list(tmp_path.glob("*x.parquet*")) == []
