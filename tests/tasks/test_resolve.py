"""What `tasks` may be in a launch file: a path, `words`, or a split of a generated set."""

from __future__ import annotations

from pathlib import Path

import pytest

import turngate.tasks
from turngate.tasks.errors import TaskInvalid
from turngate.tasks.harbor import load_tasks
from turngate.tasks.resolve import task_folder


def test_a_generated_split_is_written_once_and_found_again(tmp_path: Path) -> None:
    folder = task_folder("dataops:heldout-templates", tmp_path)
    assert len(load_tasks(folder)) == 20
    marker = folder / "marker"
    marker.touch()
    assert task_folder("dataops:heldout-templates:0", tmp_path) == folder
    assert marker.exists()
    assert task_folder("dataops:heldout-templates:3", tmp_path) != folder
    assert not list(folder.parent.glob(".writing-*"))


def test_tasks_are_loaded_by_the_name_of_a_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNGATE_CACHE", str(tmp_path))
    tasks = load_tasks(Path("dataops:train"))
    assert len(tasks) == 200
    assert tasks[0].folder.is_relative_to(tmp_path)
    assert tasks[0].name == "add-function-01"


@pytest.mark.parametrize("spec", ["dataops", "dataops:test", "dataops:train:x", "dataops:train:1:2", "dataops:"])
def test_a_wrong_split_names_the_right_ones(spec: str, tmp_path: Path) -> None:
    with pytest.raises(TaskInvalid, match="wanted dataops:all, dataops:train, dataops:heldout-parameters"):
        task_folder(spec, tmp_path)


def test_an_existing_path_wins_and_a_missing_one_is_left_to_the_loader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words").mkdir()
    assert task_folder("words") == Path("words")
    assert task_folder(tmp_path / "nothing") == tmp_path / "nothing"
    (tmp_path / "words").rmdir()
    assert task_folder("tasks/words") == Path(turngate.tasks.__file__).parent / "words"
    with pytest.raises(TaskInvalid, match=r"no such folder"):
        load_tasks(Path("missing"))
