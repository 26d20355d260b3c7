"""Real Gemini CLI, in its sandbox, through a real gateway: Gemini's wire, calls without the gateway's ids."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import pytest

from tests.conftest import FindModel
from tests.fake_engine.runner import FakeEngine
from tests.fake_engine.settings import FakeSettings
from tests.gateway_process import GatewayProcess
from tests.harnesses.conftest import StageMaker, TaskMaker
from tests.harnesses.test_opencode import (
    ONE,
    assert_each_token_is_trained_once,
    call,
    leased_rows,
    recorded,
)
from turngate.harnesses.base import Endpoint, HarnessOptions, Output, Places
from turngate.harnesses.gemini_cli import EMPTY_NOTICE, GeminiCli
from turngate.harnesses.rollout import run_rollout
from turngate.proxy.verify import verify_store

Serve = Callable[..., GatewayProcess]
SHELL = "run_shell_command"

ODD_TURNS = [
    {"content": "  Look.\n\n", "tool_calls": [call(SHELL, '{ "description":"x" ,  "command" : "ls\\u0020-a" }')]},
    {
        "tool_calls": [
            call("write_file", '{"content":"h\\u00e9llo \\ud83d\\ude00 wörld\\n","file_path":"a.txt"}'),
            call(SHELL, '{"command": "echo \\"{\\\\\\"x\\\\\\": 1.50}\\" > b.json"}'),
        ]
    },
    {
        "content": "Now I read 日本語 and emoji 🎉:\t",
        "tool_calls": [
            call("read_file", '{"file_path":"a.txt", "start_line": 1.0}'),
            call("read_file", '{"start_line": 1e0, "file_path": "./b.json"}'),
            call("read_file", '{"file_path":"a.txt", "start_line": 1.0}'),
        ],
    },
    {"content": "Broken.", "tool_calls": [call(SHELL, '{"command": "ls", "description"')]},
    {"tool_calls": [call("nonsense", '{"x":1}')]},
    "  Done: the file says héllo 😀. \n",
]


@pytest.mark.harness
async def test_six_turns_of_odd_tool_calls_are_one_row_without_a_break(
    serve: Serve, make_stage: StageMaker, make_task: TaskMaker
) -> None:
    gateway = serve(ODD_TURNS)
    options = {"context_tokens": 32000}
    stage = make_stage(gateway, harness="gemini-cli", group_size=2, harness_options=options)
    task = make_task("grep -q 'héllo 😀 wörld' a.txt && grep -q x b.json && " + ONE)
    result = await run_rollout(stage, task, "group")
    assert (result.outcome, result.reward) == ("scored", 1.0), result.detail
    found = recorded(gateway, result)
    assert Counter(turn.label for turn in found) == {"main": 6}
    assert [(turn.kind, turn.break_cause) for turn in found] == [("first", None)] + [("spliced", None)] * 5
    rows = leased_rows(gateway, result)
    assert [len(row.turns) for row in rows] == [6]
    assert_each_token_is_trained_once(rows, found, {"main"})
    assert verify_store(gateway.store).problems == []


@pytest.mark.harness
async def test_further_prompts_resume_the_session_and_an_answer_cut_by_its_limit_stays(
    serve: Serve, make_stage: StageMaker, make_task: TaskMaker
) -> None:
    gateway = serve(["one two three four five six seven eight nine ten", "Fine."])
    options = {"context_tokens": 32000, "max_answer_tokens": 5, "tools": False, "system_prompt": "Be short."}
    stage = make_stage(gateway, harness="gemini-cli", group_size=2, harness_options=options)
    result = await run_rollout(stage, make_task(ONE, prompts=('First "it" $HOME.', "-Second.")), "group")
    assert (result.outcome, result.reward) == ("scored", 1.0), result.detail
    found = recorded(gateway, result)
    assert [(turn.kind, turn.finish_reason) for turn in found] == [("first", "length"), ("spliced", "stop")]
    system, first = found[0].request["messages"]
    assert system["content"] == "Be short."
    assert first["content"][-1]["text"] == 'First "it" $HOME.'
    assert not found[0].request["tools"]
    assert found[1].request["messages"] == [{"role": "user", "content": "-Second."}]
    assert [len(row.turns) for row in leased_rows(gateway, result)] == [2]


@pytest.mark.harness
async def test_an_empty_answer_is_dropped_and_the_note_about_it_is_a_break_without_a_turn_before_it(
    serve: Serve, make_stage: StageMaker, make_task: TaskMaker
) -> None:
    gateway = serve({"returned an empty response": ["Two."], "": [""]})
    options = {"context_tokens": 32000, "tools": False}
    stage = make_stage(gateway, harness="gemini-cli", group_size=2, harness_options=options)
    result = await run_rollout(stage, make_task(ONE), "group")
    assert (result.outcome, result.reward) == ("scored", 1.0), result.detail
    found = recorded(gateway, result)
    assert [(turn.kind, turn.break_cause) for turn in found] == [("first", None), ("break", "message_edited")]
    assert_each_token_is_trained_once(leased_rows(gateway, result), found, {"main"})


@pytest.mark.harness
async def test_silence_before_and_within_an_answer_is_bridged(
    model_dir: FindModel, tmp_path: Path, make_stage: StageMaker, make_task: TaskMaker
) -> None:
    slow = FakeSettings(latency_first_s=1.0, tokens_per_s=8.0, intervals=False)
    folder, turns = model_dir("qwen-coder-0.5b"), [{"tool_calls": [call(SHELL, '{"command": "ls"}')]}, "It is slow."]
    with (
        FakeEngine(folder, turns, settings=slow) as engine,
        GatewayProcess(engine.url, tmp_path / "store", "--keepalive-s", "0.05") as gateway,
    ):
        stage = make_stage(gateway, harness="gemini-cli", group_size=2, harness_options={"context_tokens": 32000})
        result = await run_rollout(stage, make_task("grep -q slow answer.txt && " + ONE), "group")
        assert (result.outcome, result.reward) == ("scored", 1.0), result.detail
        assert [turn.kind for turn in recorded(gateway, result)] == ["first", "spliced"]


def test_everything_that_asks_the_model_beside_the_work_is_off() -> None:
    endpoint = Endpoint("http://x/s/secret/v1", "k", "m")
    files = GeminiCli().files(endpoint, HarnessOptions(system_prompt="Be short.", tools=False))
    settings = json.loads(files[".gemini/settings.json"])
    assert settings["model"]["skipNextSpeakerCheck"] is True
    assert settings["tools"]["core"] == []
    places = Places(*(PurePosixPath(path) for path in ("/h", "/node", "/home", "/w")))
    assert GeminiCli().env(places, endpoint)["GOOGLE_GEMINI_BASE_URL"] == "http://x/s/secret"
    words = GeminiCli().command(places, endpoint, ["-a", "b"], HarnessOptions(system_prompt="Be short."))
    assert words[-2:] == ["-a", "b"]
    assert "GEMINI_SYSTEM_MD=/home/.gemini/system-prompt.md" in words[2]


def test_the_answer_is_the_text_after_the_last_tool_and_an_error_result_is_a_fault() -> None:
    def event(**fields: str) -> str:
        return json.dumps(fields)

    def said(text: str) -> str:
        return event(type="message", role="assistant", content=text)

    lines = ["no event", said("one"), event(type="tool_use"), event(type="tool_result"), said("tw"), said("o")]
    lines.append(event(type="result", status="success"))
    assert GeminiCli().verdict(Output(0, "\n".join(lines), "")).answer == "two"
    assert GeminiCli().verdict(Output(0, event(type="result", status="error"), "")).fault == "harness_error"
    assert GeminiCli().verdict(Output(1, "", "")).fault == "harness_exit_1"


def test_a_policy_that_says_nothing_is_no_fault() -> None:
    error = json.dumps({"type": "error", "message": f"{EMPTY_NOTICE}. This may be …"})
    verdict = GeminiCli().verdict(Output(0, error + '\n{"type": "result", "status": "error"}', ""))
    assert (verdict.fault, verdict.answer, verdict.notes["answer_empty"]) == (None, "", 1)
