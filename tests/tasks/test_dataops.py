"""The dataops set: how many, which splits, the same bytes every time, instructions a small model can follow."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.tasks.dataops_workspaces import all_cases
from turngate.tasks.dataops import SPLITS, write_set
from turngate.tasks.dataops.functions import BROKEN, MISSING
from turngate.tasks.dataops.generate import names, task_files
from turngate.tasks.dataops.registry import TEMPLATES
from turngate.tasks.harbor import load_tasks
from turngate.tasks.steps import Bash, Say, Write, load_steps

CASES = all_cases()


def test_there_are_200_tasks_to_train_and_twice_20_held_out() -> None:
    assert Counter(case.split for case in CASES) == {
        "train": 200,
        "heldout-parameters": 20,
        "heldout-templates": 20,
    }
    trained = {one.name for one, _ in names("train")}
    assert {one.name for one, _ in names("heldout-parameters")} == trained
    held_out = {one.name for one, _ in names("heldout-templates")}
    assert len(held_out) >= 3
    assert not held_out & trained
    assert len(trained | held_out) == len(TEMPLATES) >= 12


def test_there_are_four_levels_and_half_of_the_training_is_easy() -> None:
    levels = Counter(case.template.level for case in CASES if case.split == "train")
    assert set(levels) == {1, 2, 3, 4}
    assert 0.45 <= (levels[1] + levels[2]) / 200 <= 0.6
    assert {case.template.level for case in CASES if case.split == "heldout-templates"} == {1, 2, 3, 4}


def test_no_two_tasks_are_the_same() -> None:
    assert len({(case.made.instruction, tuple(case.made.files.items())) for case in CASES}) == len(CASES)
    assert len({str(case.made.checks) for case in CASES}) == len(CASES)


def test_the_same_seed_gives_the_same_bytes_in_another_process_and_another_seed_does_not(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "turngate.tasks.dataops", str(tmp_path)],
        env={**os.environ, "PYTHONHASHSEED": "77"},
        check=True,
        capture_output=True,
    )
    assert {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*") if path.is_file()} == {
        f"{case.name}/{name}": text
        for case in CASES
        for name, text in task_files(case.template, case.number, case.split).items()
    }
    other = [task_files(case.template, case.number, case.split, seed=1)["tests/checks.json"] for case in CASES]
    same = [task_files(case.template, case.number, case.split)["tests/checks.json"] for case in CASES]
    assert sum(a != b for a, b in zip(other, same, strict=True)) >= 220


@pytest.mark.parametrize("split", SPLITS)
def test_a_split_is_read_as_harbor_tasks_with_playable_steps(split: str, tmp_path: Path) -> None:
    write_set(tmp_path, split)
    tasks = load_tasks(tmp_path)
    assert len(tasks) == {"train": 200}.get(split, 20)
    for task in tasks:
        assert task.answer_file == "final_message.txt"
        assert (task.reward_low, task.reward_high) == (0.0, 1.0)
        assert isinstance(load_steps(task.folder)[-1], Say)
        assert all(path.read_bytes() for path in task.folder.rglob("*") if path.is_file())


def test_an_unknown_split_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there are all, train, heldout-parameters"):
        write_set(tmp_path, "test")


def test_instructions_are_short_and_vary_within_a_template() -> None:
    assert all(len(case.made.instruction.split()) <= 80 for case in CASES)
    for template in TEMPLATES:
        firsts = {tuple(case.made.instruction.split()[:2]) for case in CASES if case.template is template}
        assert len(firsts) >= 3, template.name


def test_the_set_of_seed_0_is_the_one_that_results_were_measured_on() -> None:
    total = hashlib.sha256()
    for case in CASES:
        total.update(f"{case.name}\0{case.made.instruction}\0{sorted(case.made.files.items())}".encode())
    assert total.hexdigest()[:16] == "70c761a80b691a3f", "another set: older figures do not apply to it"


def test_inputs_are_small() -> None:
    for case in CASES:
        assert all(1 <= len(text.splitlines()) <= 60 for text in case.made.files.values()), case.name
        assert sum(len(text) for text in case.made.files.values()) < 6000, case.name


def test_level_1_is_one_short_action_and_level_2_one_command_and_higher_levels_look_first() -> None:
    for case in CASES:
        steps = case.made.steps[:-1]
        if case.template.level <= 2:
            assert len(steps) == 1, case.name
            step = steps[0]
            text = step.command if isinstance(step, Bash) else step.content if isinstance(step, Write) else ""
            assert 0 < len(text) < 120, case.name
        else:
            assert 3 <= len(steps) <= 5, case.name


def test_every_bug_shows_in_the_visible_case_and_every_number_has_a_function_of_its_own() -> None:
    assert len(BROKEN) == len(MISSING) == 11
    for function in (*BROKEN, *MISSING):
        assert function.source.count(function.right) == 1
        assert function.buggy.count(function.wrong) == 1
    for function in BROKEN:
        space: dict[str, object] = {}
        exec(function.buggy, space)
        assert space[function.name](*function.cases[0]) != function.results()[0], function.name  # type: ignore[operator]


def test_wanted_results_are_not_in_the_workspace() -> None:
    for template, number in names("train"):
        files = task_files(template, number, "train")
        assert not any("checks.json" in text for name, text in files.items() if name.startswith("environment/"))
