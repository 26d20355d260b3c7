"""Settings files: what is wrong with one is told in words, with the line, by every command that reads one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from turngate.harnesses.run import read_settings as run_settings
from turngate.harnesses.setting_files import parse_yaml, read_mapping
from turngate.trainer.evaluator import read_settings as eval_settings
from turngate.trainer.launch_config import load
from turngate.trainer.train import load_settings

READERS: list[Callable[[Path], object]] = [
    lambda file: run_settings(file, []),
    lambda file: eval_settings(file, []),
    lambda file: load(file),
    lambda file: load_settings(file, {}),
]
WRONG = {
    "run:\n  harness: caf\xe9\n".encode(
        "latin-1"
    ): r"wrong\.yaml is not UTF-8 \(byte 0xe9 in line 2\): save it as UTF-8",
    b"run:\n  steps: 1\n  groups: 2\n  steps: 3\n": r"'steps' stands in line 2 and again in line 4; keep one",
    b"run: [": r"wrong\.yaml is not YAML",
    b"when: 2026-13-45": r"wrong\.yaml is not YAML: month must be",
    b"- run": "a configuration is a mapping of keys to values",
    b"": "a configuration is a mapping of keys to values",
}


@pytest.mark.parametrize("content", list(WRONG))
@pytest.mark.parametrize("reader", READERS, ids=["run", "eval", "launch", "train"])
def test_a_wrong_file_is_told_in_words(tmp_path: Path, reader: Callable[[Path], object], content: bytes) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_bytes(content)
    with pytest.raises(Exception, match=WRONG[content]) as told:
        reader(file)
    assert not isinstance(told.value, UnicodeDecodeError)


def test_a_file_that_is_not_there_is_told_without_a_number(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*none\.yaml: No such file or directory$"):
        read_mapping(tmp_path / "none.yaml")


def test_a_section_is_taken_where_there_is_one_and_must_be_a_mapping(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("run: {a: 1}\nempty:\nwrong: 3\n")
    assert read_mapping(file, "run") == {"a": 1}
    assert read_mapping(file, "empty") == {}
    assert read_mapping(file, "none") == read_mapping(file)
    with pytest.raises(ValueError, match=r"run\.yaml: wrong: a configuration is a mapping"):
        read_mapping(file, "wrong")


def test_a_key_may_stand_again_in_another_mapping_and_behind_a_merge() -> None:
    text = "base: &b {a: 1, b: 2}\nother: {<<: *b, a: 3}\n"
    assert parse_yaml(text)["other"] == {"a": 3, "b": 2}


def test_a_key_that_stands_twice_in_an_override_is_refused() -> None:
    with pytest.raises(ValueError, match=r"override .*'a' stands in line 1 and again in line 1"):
        run_settings(None, ["sampling={a: 1, a: 2}"])
