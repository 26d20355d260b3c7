"""`turngate tasks`: what is wrong is named with file, key and fix; solutions are run; a store is summed up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gateway_process import GatewayProcess
from tests.harnesses.conftest import TaskMaker
from turngate.harnesses.tasks_command import tasks_command
from turngate.proxy import wire
from turngate.proxy.task_stats import stats_command

GRADE = "grep -qx 42 a.txt && grep -qx said answer.txt && r=1 || r=0.5; echo $r > /logs/verifier/reward.txt"


def solve(folder: Path, script: str) -> None:
    """Give a task a solution."""
    (folder / "solution").mkdir()
    (folder / "solution" / "solve.sh").write_text(script)


def test_every_wrong_task_is_named_with_file_key_and_fix(
    make_task: TaskMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [make_task(GRADE).folder for _ in range(4)]
    for folder, text in zip(
        folders,
        (
            'version = "1.0"\n[metadata.turngate]\nprompts = ["prompt0.md"]\nreward_rang = [0, 1]\n',
            'version = "1.0"\n[metadata.turngate]\nprompts = ["other.md"]\n',
            'version = "1.0"\n[verifier]\ntimeout_sec = -1\n',
        ),
        strict=False,
    ):
        (folder / "task.toml").write_text(text)
    assert tasks_command(["check", str(folders[0].parent)]) == 1
    said = capsys.readouterr()
    assert f"{folders[0] / 'task.toml'}: metadata.turngate.reward_rang: unknown key; those there are:" in said.err
    assert str(folders[1] / "other.md") in said.err
    assert f"{folders[2] / 'task.toml'}: verifier.timeout_sec" in said.err
    assert "1 of 4 tasks are fine" in said.out
    assert tasks_command(["check", str(folders[3])]) == 0
    assert tasks_command(["check", "/nonexistent"]) == 2


def test_one_unreadable_task_hides_no_other_and_solutions_are_checked_too(
    make_task: TaskMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [make_task(GRADE).folder for _ in range(4)]
    (folders[0] / "prompt0.md").write_bytes(b"\xff\xfe")
    solve(folders[1], "")
    solve(folders[2], "true\n")
    (folders[2] / "solution" / "steps.json").write_text('[{"tool": "fly"}]')
    solve(folders[3], "echo 42 > a.txt\n")
    assert tasks_command(["check", str(folders[0].parent)]) == 1
    said = capsys.readouterr()
    assert f"{folders[0] / 'prompt0.md'}: not UTF-8" in said.err
    assert f"{folders[1] / 'solution' / 'solve.sh'}: empty; write the commands" in said.err
    assert f"{folders[2] / 'solution' / 'steps.json'}: 0: " in said.err
    assert "1 of 4 tasks are fine" in said.out


def test_rows_of_a_dataset_are_checked_with_their_own_column_and_have_no_oracle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "2+2?", "solution": "4"}\n')
    assert tasks_command(["check", str(rows), "--prompt-column", "question"]) == 0
    assert "1 rows are fine" in capsys.readouterr().out
    assert tasks_command(["check", str(rows)]) == 1
    assert "set dataset.prompt_column to one of: question" in capsys.readouterr().err
    assert tasks_command(["oracle", str(rows)]) == 1
    assert "have no solutions to run" in capsys.readouterr().err


def test_a_solution_must_earn_the_full_reward(make_task: TaskMaker, capsys: pytest.CaptureFixture[str]) -> None:
    good, poor, broken, none = (make_task(GRADE) for _ in range(4))
    solve(good.folder, "echo 42 > a.txt\necho said\n")
    solve(poor.folder, "echo 41 > a.txt\n")
    solve(broken.folder, "#!/bin/sh\nexit 7\n")
    assert tasks_command(["oracle", str(good.folder)]) == 0
    assert tasks_command(["oracle", str(good.folder.parent)]) == 1
    said = capsys.readouterr()
    assert "1 of 4 solutions earn the full reward" in said.out
    assert "the solution earns 0.5 of 1" in said.err
    assert "ended with status 7" in said.err
    assert f"{none.folder / 'solution' / 'solve.sh'}: missing" in said.err
    assert tasks_command(["oracle", str(good.folder.parent), "--limit", "1"]) == 0
    with pytest.raises(SystemExit, match="2"):
        tasks_command(["oracle", str(good.folder.parent), "--limit", "0"])


def test_a_store_is_summed_up_by_task(serve: Callable[..., GatewayProcess], capsys: pytest.CaptureFixture[str]) -> None:
    gateway = serve(["hi"])
    endings = [wire.FinishRollout(reward=reward) for reward in (1.0, 0.0, 1.0)]
    endings.append(wire.FinishRollout(outcome="unscorable", cause="harness_timeout"))
    for ending in endings:
        created = gateway.client.create_rollout(wire.NewRollout(task="sums"))
        gateway.client.finish_rollout(created.id, ending)
    gateway.client.create_rollout(wire.NewRollout(task="sums"))
    assert stats_command([str(gateway.store), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["attempts"], found["scored"], found["solved"]) == (4, 3, 2)
    assert found["causes"] == {"harness_timeout": 1}
    assert 0 < found["low"] < found["rate"] < found["high"] < 1
    assert stats_command([str(gateway.store)]) == 0
    assert "sums  4 attempts, 3 scored, 67 % solved" in capsys.readouterr().out
    assert stats_command([str(gateway.store.parent / "nowhere")]) == 2


def test_a_wrong_part_is_told_all_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["bogus"], ["stats"]):
        with pytest.raises(SystemExit) as leaving:
            tasks_command(words)
        assert leaving.value.code == 2
    said = capsys.readouterr().err
    assert "choose from 'check', 'oracle', 'stats'" in said
    assert "turngate tasks stats STORE" in said
