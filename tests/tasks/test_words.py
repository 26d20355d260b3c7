"""The `words` task set: as generated, valid, and graded by the answer's words alone."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

import turngate.tasks
from turngate.tasks.harbor import load_tasks

WORDS = Path(turngate.tasks.__file__).parent / "words"


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    """The set's generator."""
    spec = importlib.util.spec_from_file_location("words_generate", WORDS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_tasks_are_what_the_generator_writes(generate: ModuleType, tmp_path: Path) -> None:
    generate.main(tmp_path)
    made = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    kept = {
        path.relative_to(WORDS): path.read_text()
        for path in WORDS.rglob("*")
        if path.is_file() and path.parent != WORDS and "__pycache__" not in path.parts
    }
    assert made == kept


@pytest.mark.parametrize("name", ["words", "tasks/words"])
def test_the_set_is_found_by_name_from_any_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [task.name for task in load_tasks(Path(name))] == [task.name for task in load_tasks(WORDS)]


def test_there_are_enough_tasks_of_two_prompts_each() -> None:
    tasks = load_tasks(WORDS)
    assert len(tasks) >= 12
    assert all(len(task.prompts) == 2 and task.answer_file == "answer.txt" for task in tasks)


@pytest.mark.parametrize(("too_many", "reward"), [(-99, 0.0), (0, 1.0), (1, 0.9), (5, 0.5), (10, 0.0), (50, 0.0)])
def test_the_reward_falls_with_every_word_too_many(
    generate: ModuleType, tmp_path: Path, too_many: int, reward: float
) -> None:
    for folder, _, most in generate.TOPICS:
        assert graded(folder, most + too_many, tmp_path) == pytest.approx(reward)


def test_one_word_is_enough_and_none_is_not(generate: ModuleType, tmp_path: Path) -> None:
    folder = generate.TOPICS[0][0]
    assert [graded(folder, words, tmp_path) for words in (0, 1)] == [0.0, 1.0]


def graded(folder: str, words: int, workspace: Path) -> float:
    """What a task's verifier gives for an answer of so many words."""
    (workspace / "answer.txt").write_text(" ".join(["word"] * max(words, 0)) + "\n")
    test = str(WORDS / folder / "tests" / "test.sh")
    subprocess.run(["sh", test], cwd=workspace, env={"TURNGATE_REWARDS": str(workspace)}, check=True)
    return float((workspace / "reward.txt").read_text())
