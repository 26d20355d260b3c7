"""Rows of a dataset through the chat harness: no sandbox, real turns, TRL's own reward function."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gateway_process import GatewayProcess
from turngate.harnesses import run as run_module
from turngate.harnesses.chat import Chat
from turngate.harnesses.errors import Fault, SettingsWrong
from turngate.harnesses.judging import Judges
from turngate.harnesses.preflight import check_run, needs_sandbox
from turngate.harnesses.run import run_command
from turngate.harnesses.settings import RunSettings
from turngate.proxy import wire
from turngate.tasks.errors import TaskInvalid
from turngate.tasks.judges import Judge

ROWS = [
    {"prompt": "What is one third?", "solution": r"$\frac{1}{3}$"},
    {"prompt": [{"role": "system", "content": "Be exact."}, {"role": "user", "content": "2+2?"}], "solution": "$4$"},
]


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """A dataset as one JSON file."""
    folder.mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def write_function(folder: Path, body: str) -> str:
    """A reward function in a file of its own; its name for settings."""
    (folder / "mine.py").write_text("import time, os\ndef reward(completions, **kwargs):\n    " + body + "\n")
    return f"{folder / 'mine.py'}:reward"


@pytest.mark.parametrize("agent", [("harness=chat",), pytest.param((), marks=pytest.mark.harness)], ids=["chat", "pi"])
def test_a_dataset_runs_with_one_setting_and_is_judged_by_trl(
    agent: tuple[str, ...],
    serve: Callable[..., GatewayProcess],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_module, "_handle_signals", lambda runner: None)
    gateway = serve({"one third": [r"It is \boxed{\frac{2}{6}}."], "2+2": ["It is 5."]})
    rows = write_rows(tmp_path / "rows", [ROWS[0], {**ROWS[1], "prompt": "2+2?"}])
    key = f"admin_key_file={gateway.store / 'admin.key'}"
    words = [f"gateway={gateway.url}", key, *agent, f"scratch={tmp_path}", "epochs=1", "group_size=2", "--json"]
    assert run_command([f"tasks={rows}", *words]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert {name: task["solve_rate"] for name, task in summary["by_task"].items()} == {"rows-0": 1.0, "rows-1": 0.0}
    groups = gateway.client.lease(wire.NewLease(policy="policy", max_groups=9)).groups
    found = [(rollout.reward, rollout.rewards, len(rollout.rows)) for group in groups for rollout in group.rollouts]
    assert sorted(found, key=str) == sorted(
        [(reward, {"accuracy_reward": reward}, 1) for reward in (0.0, 0.0, 1.0, 1.0)], key=str
    )


def test_messages_keep_their_system_prompt_and_no_sandbox_is_needed(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows", [ROWS[1]])
    harness, (task,) = check_run(RunSettings(tasks=str(rows), harness="chat"))
    assert (task.system, task.prompts) == ("Be exact.", ("2+2?",))
    assert not needs_sandbox(harness, [task])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"harness": "chatt"}, "chatt"),
        ({"harness_options": {"extra_args": ["-x"]}}, "run.harness_options.extra_args"),
        ({"tasks": "/nonexistent"}, "/nonexistent"),
        ({"dataset": {"prompt_column": "question"}}, "prompt_column"),
        ({"dataset": {"rewards": ["no.such.function"]}}, "no.such.function"),
        ({"dataset": {"reward_weights": [1.0, 2.0]}}, "reward_weights"),
        ({"dataset": {"split": "valid", "rewards": ["math.sqrt"]}}, "math.sqrt failed"),
    ],
)
def test_what_is_wrong_is_known_before_anything_starts(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    rows = write_rows(tmp_path / "rows", ROWS[:1])
    with pytest.raises(Exception, match=words.replace(".", r"\.")) as caught:
        check_run(RunSettings.model_validate({"tasks": str(rows), "harness": "chat", **settings}))
    assert type(caught.value).__module__.startswith("turngate.")


@pytest.mark.parametrize(("text", "words"), [("", "empty file"), ('{"prompt": "x"', "JSON")])
def test_a_file_that_is_no_dataset_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(TaskInvalid, match=words) as caught:
        check_run(RunSettings(tasks=str(path), harness="chat"))
    assert str(path) in str(caught.value)


def test_a_judge_that_hangs_or_dies_costs_one_answer(tmp_path: Path) -> None:
    body = "time.sleep(60 * (completions[0] == 'hang')); completions[0] == 'die' and os._exit(3); return [0.5]"
    judge = Judge((write_function(tmp_path, body),), (2.0,), "p", {})
    judges = Judges()
    try:
        for answer, cause in (("hang", "verifier_timeout"), ("die", "verifier_exit")):
            with pytest.raises(Fault) as fault:
                judges.ask(judge, answer, 2.0)
            assert fault.value.cause == cause
        assert judges.ask(judge, "fine", 30.0).value == 1.0
    finally:
        judges.close()


def test_an_agent_without_dialogue_refuses_tasks_of_two_prompts() -> None:
    with pytest.raises(SettingsWrong, match="one prompt"):
        check_run(RunSettings(tasks="words", harness="mini-swe-agent"))
    assert Chat().unsupported["extra_args"]
