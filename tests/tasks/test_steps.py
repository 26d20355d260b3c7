"""Steps of a solution: read and refused in words, and the same deed as a shell script."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from turngate.tasks.errors import TaskInvalid
from turngate.tasks.steps import Bash, Edit, Read, Say, Step, Write, dump_steps, load_steps, solve_script

STEPS: list[Step] = [
    Bash(command="mkdir -p 'a b'"),
    Write(path="a b/sub dir/x.txt", content='it\'s $HOME\n\\n "quoted" `tick`\n'),
    Edit(path="a b/sub dir/x.txt", old="it's $HOME\n", new="é 'new'\n\n"),
    Read(path="a b/sub dir/x.txt"),
    Say(text="Done."),
]


def written(folder: Path, text: str) -> Path:
    (folder / "solution").mkdir()
    (folder / "solution" / "steps.json").write_text(text)
    return folder


def test_steps_survive_the_file(tmp_path: Path) -> None:
    assert load_steps(written(tmp_path, dump_steps(STEPS))) == STEPS


def test_the_script_does_what_the_steps_say_and_stops_at_a_failure(tmp_path: Path) -> None:
    done = subprocess.run(["bash", "-c", solve_script(STEPS)], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert (tmp_path / "a b/sub dir/x.txt").read_text() == "é 'new'\n\n\\n \"quoted\" `tick`\n"
    assert done.stdout == (tmp_path / "a b/sub dir/x.txt").read_text()
    failing = solve_script([Bash(command="false"), Bash(command="touch reached")])
    assert subprocess.run(["bash", "-c", failing], cwd=tmp_path, check=False).returncode == 1
    assert not (tmp_path / "reached").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "as the last step"),
        ('[{"tool": "bash", "command": "ls"}]', "as the last step"),
        ('[{"tool": "say", "text": "a"}, {"tool": "say", "text": "b"}]', "exactly one"),
        ('[{"tool": "fly"}]', "0: "),
        ('[{"tool": "bash", "comand": "ls"}]', "command"),
        ("{", "JSON"),
    ],
)
def test_a_wrong_file_is_told_what_is_wrong(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(TaskInvalid, match=message):
        load_steps(written(tmp_path, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TaskInvalid, match=r"steps\.json: missing"):
        load_steps(tmp_path)
