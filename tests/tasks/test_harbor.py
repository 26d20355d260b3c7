"""Harbor task directories: what is read, and what a wrong one is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from turngate.tasks.errors import TaskInvalid
from turngate.tasks.harbor import load_task, load_tasks


def write(folder: Path, toml: str = 'version = "1.0"\n', **files: str) -> Path:
    """A task directory with an instruction and a verifier."""
    found = {"task.toml": toml, "instruction.md": "Do it.\n", "tests/test.sh": "echo 1 > /logs/verifier/reward.txt"}
    for name, text in {**found, **files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


HARBOR = """
version = "1.0"
[metadata]
author_name = "Somebody"
difficulty = "easy"
tags = ["a"]
[verifier]
timeout_sec = 120.0
env = { KEY = "value" }
[agent]
timeout_sec = 90.0
[environment]
build_timeout_sec = 600.0
cpus = 1
memory_mb = 2048
workdir = "/app"
"""


def test_a_task_as_harbor_writes_it_is_read(tmp_path: Path) -> None:
    task = load_task(write(tmp_path / "hello", HARBOR))
    assert (task.name, task.prompts, str(task.workdir)) == ("hello", ("Do it.",), "/app")
    assert (task.agent_timeout_s, task.verifier_timeout_s, task.verifier_env) == (90.0, 120.0, {"KEY": "value"})
    assert (task.reward_low, task.reward_high) == (0.0, 1.0)


def test_further_prompts_keep_their_order(tmp_path: Path) -> None:
    toml = '[metadata.turngate]\nprompts = ["instruction.md", "second.md"]\nreward_range = [-1.0, 2.0]\n'
    task = load_task(write(tmp_path, toml, **{"second.md": "  And then?\n\n"}))
    assert task.prompts == ("Do it.", "And then?")
    assert (task.reward_low, task.reward_high) == (-1.0, 2.0)


def test_a_folder_of_tasks_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    for name in ("b", "a", "c/d"):
        write(tmp_path / name)
    assert [task.name for task in load_tasks(tmp_path)] == ["a", "b", "c/d"]
    assert [task.name for task in load_tasks(tmp_path / "a")] == ["a"]


def test_the_digest_follows_every_file(tmp_path: Path) -> None:
    before = load_task(write(tmp_path)).digest
    assert load_task(tmp_path).digest == before
    write(tmp_path, **{"tests/data.txt": "x"})
    assert load_task(tmp_path).digest != before


WRONG = {
    "[metadata.turngate]\nprompt = 1": ("metadata.turngate.prompt", "unknown key"),
    "[metadata.turngate]\nprompts = []": ("metadata.turngate.prompts", "at least 1"),
    '[metadata.turngate]\nprompts = ["nowhere.md"]': ("nowhere.md", "missing"),
    '[metadata.turngate]\nprompts = ["../../secret"]': ("secret", "missing"),
    "[metadata.turngate]\nreward_range = [1, 1]": ("reward_range", "low < high"),
    "[metadata.turngate]\nreward_range = [0, inf]": ("reward_range", "low < high"),
    '[metadata.turngate]\nanswer_file = "a/b"': ("answer_file", "plain file name"),
    "[agent]\ntimeout_sec = 0": ("agent.timeout_sec", "greater than 0"),
    '[environment]\nworkdir = "/"': ("environment.workdir", "below /"),
    '[environment]\nworkdir = "app"': ("environment.workdir", "absolute"),
    '[[steps]]\nname = "one"': ("steps", "not supported"),
    "[agent]\ntimeout_secs = 9": ("agent.timeout_secs", "did you mean agent.timeout_sec?"),
    "[verifer]\ntimeout_sec = 9": ("verifer", "did you mean verifier?"),
    "version = ": ("task.toml", "not TOML"),
    'verifier = "x"': ("verifier", "must be a table, [verifier]"),
}


@pytest.mark.parametrize("toml", WRONG)
def test_a_wrong_task_is_refused_naming_file_and_key(tmp_path: Path, toml: str) -> None:
    with pytest.raises(TaskInvalid) as refused:
        load_task(write(tmp_path, toml))
    assert all(words in str(refused.value) for words in WRONG[toml]), refused.value
    assert str(tmp_path) in str(refused.value)


@pytest.mark.parametrize("missing", ["task.toml", "instruction.md", "tests/test.sh"])
def test_a_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    write(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(TaskInvalid, match=missing.replace(".", r"\.")):
        load_task(tmp_path)


def test_an_empty_instruction_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskInvalid, match="empty"):
        load_task(write(tmp_path, **{"instruction.md": " \n"}))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("instruction.md", b"\xff\xfe", "not UTF-8"),
        ("environment", b"x", "must be a folder"),
        ("task.toml", b"\xff", "TOML"),
    ],
)
def test_a_file_that_is_not_what_it_should_be_is_named(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (write(tmp_path) / name).write_bytes(content)
    with pytest.raises(TaskInvalid, match=words) as refused:
        load_task(tmp_path)
    assert str(tmp_path / name) in str(refused.value)


def test_a_folder_without_tasks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskInvalid, match=r"no task\.toml"):
        load_tasks(tmp_path)
    with pytest.raises(TaskInvalid, match="no such folder, and no set of that name"):
        load_tasks(tmp_path / "gone")
    with pytest.raises(TaskInvalid, match="is a file"):
        load_tasks(write(tmp_path) / "task.toml")
