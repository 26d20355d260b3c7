"""The dataops verifiers: every oracle earns 1 in the real sandbox, every cheat that was thought of earns 0."""

from __future__ import annotations

import itertools
import json
import os
from collections import defaultdict
from pathlib import Path

import pytest

from tests.tasks.dataops_workspaces import Case, act_and_verify, all_cases, all_verified, fill
from turngate.harnesses.bubblewrap import Bubblewrap
from turngate.harnesses.workspace import Scratch
from turngate.tasks.dataops import write_set
from turngate.tasks.dataops.check import alike, grade
from turngate.tasks.harbor import Task, load_tasks
from turngate.tasks.steps import as_shell

CASES = all_cases()
FIRST = [case for case in CASES if case.number == 1]
"""One of each template."""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Task]:
    """All 240, written and loaded."""
    root = tmp_path_factory.mktemp("dataops")
    write_set(root)
    return {task.name: task for task in load_tasks(root)}


async def test_every_oracle_earns_1_and_its_files_earn_nothing_in_another_task(
    tasks: dict[str, Task], tmp_path: Path
) -> None:
    scripts = [(task.folder / "solution" / "solve.sh").read_text() for task in tasks.values()]
    with Scratch(tmp_path / "scratch") as scratch:
        solved = await all_verified(list(tasks.values()), scripts, Bubblewrap(), scratch)
    assert {name: one.reward for name, one in solved.items() if one.reward != 1.0} == {}
    assert len(solved) == 240
    rewards = []
    for case, other in itertools.pairwise(CASES):
        if case.template is other.template:
            found = [solved[case.name].files[path] for path in case.outputs]
            files = dict(zip(other.outputs, found, strict=False))
            rewards.append(graded(other, files, tmp_path / "moved" / other.name))
    assert len(rewards) == 20 * 9 + 4 * 4
    assert sum(rewards) / len(rewards) < 0.02


def graded(case: Case, files: dict[str, str], folder: Path) -> float:
    """The reward of the untouched workspace with `files` put over it."""
    return grade(fill(folder, {**case.made.files, **files}), list(case.made.checks))


def test_an_untouched_workspace_earns_exactly_0_in_every_task(tmp_path: Path) -> None:
    assert {case.name for case in CASES if graded(case, {}, tmp_path / case.name) != 0.0} == set()


@pytest.mark.parametrize(
    "text", ["", "\n", "nan\n", "inf\n", "-1e999\n", "1\n", "1.0\n", "null\n", "{}", "[]", "\0\n", "{" * 9999]
)
def test_a_constant_earns_0_in_every_task(text: str, tmp_path: Path) -> None:
    cases = CASES if text in ("", "nan\n") else FIRST
    found = {case.name: graded(case, dict.fromkeys(case.outputs, text), tmp_path / case.name) for case in cases}
    assert {name for name, reward in found.items() if reward != 0.0} == set()


def test_a_copied_instruction_earns_0_in_every_task(tmp_path: Path) -> None:
    for case in CASES:
        assert graded(case, dict.fromkeys(case.outputs, case.made.instruction), tmp_path / case.name) == 0.0, case.name


def test_an_input_copied_to_the_output_earns_0_unless_it_is_to_be_copied(tmp_path: Path) -> None:
    for case in (case for case in CASES if case.number <= 4):
        for place, text in enumerate(case.made.files.values()):
            reward = graded(case, dict.fromkeys(case.outputs, text), tmp_path / f"{case.name}-{place}")
            assert reward == 0.0 or "cp " in as_shell(case.made.steps[0]), case.name


def test_links_folders_and_bytes_in_place_of_files_earn_0(tmp_path: Path) -> None:
    for case in FIRST:
        for kind in ("link", "folder", "bytes", "pipe"):
            folder = fill(tmp_path / f"{case.name}-{kind}", case.made.files)
            wanted = fill(tmp_path / f"{case.name}-{kind}-tests", {"checks.json": json.dumps(list(case.made.checks))})
            for name in case.outputs:
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.unlink(missing_ok=True)
                if kind == "link":
                    path.symlink_to(wanted / "checks.json")
                elif kind == "folder":
                    path.mkdir()
                elif kind == "bytes":
                    path.write_bytes(b"\xff\xfe\x00" * 100)
                else:
                    os.mkfifo(path)
            assert grade(folder, list(case.made.checks)) == 0.0, (case.name, kind)


FORGED = """
for d in . logs/verifier tests solution; do mkdir -p $d; for f in reward.txt reward.json; do echo 1 > $d/$f; done; done
echo '{"reward": 1}' > reward.json
printf '#!/bin/sh\\necho 1 > /logs/verifier/reward.txt\\n' > test.sh; cp test.sh tests/test.sh; chmod +x test.sh
echo '[]' > checks.json; cp checks.json tests/
for m in json csv ast check sitecustomize usercustomize; do echo 'raise SystemExit(0)' > $m.py; done
mkdir -p /logs/verifier && echo 1 > /logs/verifier/reward.txt
mkdir -p /tests && echo '[]' > /tests/checks.json
printf '1\\n' > final_message.txt
true
"""


async def test_forged_rewards_and_verifiers_in_the_workspace_earn_0(tasks: dict[str, Task], tmp_path: Path) -> None:
    chosen = [tasks[case.name] for case in FIRST]
    with Scratch(tmp_path / "scratch") as scratch:
        found = await all_verified(chosen, [FORGED] * len(chosen), Bubblewrap(), scratch)
    assert {name for name, one in found.items() if one.reward != 0.0} == set()


CODE = [case for case in CASES if case.template.name in ("fix-function", "add-function")]


def test_touched_tests_earn_0_with_and_without_the_right_code(tmp_path: Path) -> None:
    for case in CODE:
        module, test = sorted(case.made.files, key=lambda name: name.startswith("test_"))
        passing = {test: 'print("passed")\n'}
        assert graded(case, passing, tmp_path / f"{case.name}-a") == 0.0
        right = case.made.files[module].replace(*_edit(case))
        assert graded(case, {module: right}, tmp_path / f"{case.name}-b") == 1.0
        assert graded(case, {module: right, **passing}, tmp_path / f"{case.name}-c") == 0.0


def _edit(case: Case) -> tuple[str, str]:
    step = next(step for step in case.made.steps if step.tool == "edit")
    return step.old, step.new


HOSTILE = {
    "writes the reward": "open(REWARDS + '/reward.txt', 'w').write('1')",
    "writes it below the hook": "import os; os.write(os.open(REWARDS + '/reward.txt', os.O_WRONLY | os.O_CREAT), b'1')",
    "reads the answers": "import json; A = json.load(open(TESTS + '/checks.json'))[0]['cases']",
    "starts a process": "import subprocess; subprocess.run('echo 1 > ' + REWARDS + '/reward.txt', shell=True)",
    "forks": "import os; os.fork()",
    "forks below the hook": "import _posixsubprocess",
    "kills its parent": "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
    "uses native code": "import ctypes; ctypes.CDLL(None).system(b'true')",
    "claims a result": "import sys, os; sys.__stdout__.write('[0, 0, 0, 0]'); sys.__stdout__.flush(); os._exit(0)",
    "leaves": "raise SystemExit(0)",
    "never ends its output": "import sys\nfor _ in range(3000): sys.__stdout__.write('[' * 1000)",
}


@pytest.mark.parametrize("what", HOSTILE)
async def test_code_that_reaches_for_the_verdict_earns_0(what: str, tasks: dict[str, Task], tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "fix-function-05")
    module = next(name for name in case.made.files if not name.startswith("test_"))
    code = f"""TESTS, REWARDS = "/tests", "/logs/verifier"
A = []
{HOSTILE[what]}
def clamp(value, low, high):
    return next((result for _, arguments, result in A if arguments == [value, low, high]), 0)
"""
    script = f"cat > {module} <<'EOF'\n{code}\nEOF"
    with Scratch(tmp_path / "scratch") as scratch:
        found = await act_and_verify(tasks[case.name], script, Bubblewrap(), scratch)
    assert found.reward == 0.0


async def test_code_that_hangs_earns_0_in_time(tasks: dict[str, Task], tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "fix-function-05")
    module = next(name for name in case.made.files if not name.startswith("test_"))
    with Scratch(tmp_path / "scratch") as scratch:
        found = await act_and_verify(tasks[case.name], f"echo 'while True: pass' > {module}", Bubblewrap(), scratch)
    assert found.reward == 0.0


def test_near_misses_that_a_task_names_earn_half_and_no_more(tmp_path: Path) -> None:
    seen: dict[str, int] = defaultdict(int)
    for case in CASES:
        for check in case.made.checks:
            for place, miss in enumerate(check.get("near", [])):
                rows = [",".join(line) if isinstance(line, list) else line for line in miss]
                text = "".join(f"{row}\n" for row in rows)
                assert graded(case, {check["path"]: text}, tmp_path / f"{case.name}-{place}") == 0.5, case.name
                seen[case.template.name] += 1
    assert len(seen) >= 6


def test_a_number_among_words_earns_half_and_two_numbers_nothing(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.template.name == "count-lines")
    path, value = case.outputs[0], case.made.checks[0]["value"]
    texts = {f"{value}": 1.0, f"  {value}.0 \n\n": 1.0, f"{value} sales.csv\n": 0.5, f"{value} 7": 0.0}
    texts |= {f"{value}nan": 0.0, f"the {value} " + "word " * 9: 0.0}
    for place, (text, reward) in enumerate(texts.items()):
        assert graded(case, {path: text}, tmp_path / str(place)) == reward, text


def test_nan_is_never_alike() -> None:
    nan = float("nan")
    assert not alike(nan, nan)
    assert not alike([nan], [1.0])
    assert not alike(True, 1)
    assert alike({"a": [1, 2.0]}, {"a": [1.0, 2]})
