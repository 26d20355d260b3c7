"""Real Claude Code through a real gateway: odd tool calls, parallel calls, agents below agents, broken JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

import pytest

from tests.gateway_process import GatewayProcess
from tests.harnesses.conftest import StageMaker, TaskMaker
from tests.harnesses.test_opencode import assert_each_token_is_trained_once, leased_rows, recorded
from turngate.harnesses.base import Endpoint, HarnessOptions, Output, Places
from turngate.harnesses.claude_code import ClaudeCode
from turngate.harnesses.rollout import run_rollout

Serve = Callable[..., GatewayProcess]
ONE = "echo 1 > /logs/verifier/reward.txt"
OPTIONS = {"context_tokens": 32000}


def bash(arguments: Any) -> dict[str, Any]:
    """A scripted call of the shell; arguments as text are kept as they are written."""
    return {"name": "Bash", "arguments": arguments}


@pytest.mark.harness
async def test_six_turns_of_odd_calls_are_one_row_without_a_break(
    serve: Serve, make_stage: StageMaker, make_task: TaskMaker
) -> None:
    odd = '{ "timeout":1e4 ,  "description":"x", "command" : "echo h\\u00e9llo > a.txt" }'
    turns = [
        {"reasoning": "Hm.\n", "content": "  Look.\n", "tool_calls": [bash(odd)]},
        {"tool_calls": [bash('{"command": "sleep 1; echo one", "description": "x"}'), bash('{"command":"echo two"}')]},
        {"content": "Broken now.", "tool_calls": [bash('{"command": "ls", "description"')]},
        {"tool_calls": [{"name": "Nonsense", "arguments": '{"x":1.50}'}]},
        {"tool_calls": [bash('{"command": "cat a.txt"}')]},
        "All done.",
    ]
    gateway = serve(turns)
    stage = make_stage(gateway, harness="claude-code", group_size=2, history="append", harness_options=OPTIONS)
    task = make_task("grep -q héllo a.txt && " + ONE, prompts=('Say "it", -x $HOME.',))
    result = await run_rollout(stage, task, "group")
    found = recorded(gateway, result)
    assert (result.outcome, result.reward) == ("scored", 1.0), result.detail
    assert Counter(turn.label for turn in found) == {"main": 6}
    assert [turn.kind for turn in found] == ["first", *["spliced"] * 5], [turn.break_cause for turn in found]
    (row,) = leased_rows(gateway, result)
    assert_each_token_is_trained_once([row], found, {"main"})


def agent(number: int) -> dict[str, Any]:
    """A scripted start of a sub-agent."""
    words = {"description": f"part {number}", "prompt": f"CHILD{number} looks", "subagent_type": "claude"}
    return {"name": "Agent", "arguments": words}


@pytest.mark.harness
async def test_children_in_parallel_are_told_by_their_header_and_hang_below_the_call_that_started_them(
    serve: Serve, make_stage: StageMaker, make_task: TaskMaker
) -> None:
    script: dict[str, list[Any]] = {
        f"CHILD{n} looks": [{"tool_calls": [bash({"command": f"echo {n} > {n}.txt"})]}, f"{n} is done"] for n in (1, 2)
    }
    gateway = serve({**script, "": [{"content": "Split.", "tool_calls": [agent(1), agent(2)]}]})
    stage = make_stage(gateway, harness="claude-code", group_size=2, harness_options=OPTIONS)
    result = await run_rollout(stage, make_task("cat 1.txt 2.txt && " + ONE), "group")
    assert (result.outcome, result.reward) == ("scored", 1.0), result.detail
    found = recorded(gateway, result)
    main = [turn for turn in found if turn.label == "main"]
    children = [turn for turn in found if turn.label == "subagent"]
    assert (len(main), len(children), len({turn.agent for turn in children})) == (2, 4, 2)
    assert {turn.parent for turn in children} == {main[0].id}
    assert {turn.kind for turn in found} == {"first", "spliced"}
    assert_each_token_is_trained_once(leased_rows(gateway, result), found, {"main"})


@pytest.mark.harness
async def test_compaction_is_labelled_and_what_follows_it_is_a_break_of_that_cause(
    serve: Serve, make_stage: StageMaker, make_task: TaskMaker
) -> None:
    counted = "<analysis>Numbers.</analysis>\n<summary>They counted to 1200.</summary>"
    turns = [{"tool_calls": [bash({"command": "echo hi"})]}, "Done."]
    gateway = serve({"Respond with TEXT ONLY": [counted], "They counted": ["Went on."], "": turns})
    options = {**OPTIONS, "compaction": True}
    stage = make_stage(gateway, harness="claude-code", group_size=2, harness_options=options)
    task = make_task(ONE, prompts=("Do it.", "/compact", "Go on."))
    result = await run_rollout(stage, task, "group")
    assert (result.outcome, result.reward) == ("scored", 1.0), result.detail
    found = recorded(gateway, result)
    assert [turn.label for turn in found] == ["main", "main", "compaction", "main"]
    assert found[-1].response["content"] == "Went on."
    assert (found[-1].kind, found[-1].break_cause) == ("break", "history_compacted")
    assert_each_token_is_trained_once(leased_rows(gateway, result), found, {"main"})


def test_what_reports_home_compacts_or_starts_agents_is_off_unless_asked_for() -> None:
    places = Places(*(PurePosixPath(path) for path in ("/h", "/node", "/home", "/w")))
    endpoint = Endpoint("http://x/s/secret/v1", "k", "m")
    claude = ClaudeCode()
    assert claude.env(places, endpoint)["ANTHROPIC_BASE_URL"] == "http://x/s/secret"
    assert "DISABLE_TELEMETRY" in claude.env(places, endpoint)
    plain = claude.command(places, endpoint, ['-a "b"', "c"], HarnessOptions(subagents=False, system_prompt="Be."))
    assert plain[-2:] == ['-a "b"', "c"]
    first, second = plain[2].split(" && ")
    assert "DISABLE_COMPACT=1" in first
    assert "--disallowedTools Task Agent" in first
    assert "--system-prompt Be." in first
    assert "--continue" not in first
    assert "--continue" in second
    asked = claude.command(places, endpoint, ["c"], HarnessOptions(compaction=True, tools=False))[2]
    assert "DISABLE_COMPACT" not in asked
    assert "--tools ''" in asked


def test_the_answer_is_the_last_result_and_what_it_calls_an_error_is_a_fault() -> None:
    lines = ["noise", '{"type": "result", "result": "one", "num_turns": 2}']
    lines.append('{"type": "result", "result": "two", "num_turns": 3}')
    told = ClaudeCode().verdict(Output(0, "\n".join(lines), ""))
    assert (told.answer, told.fault, told.notes) == ("two", None, {"steps": 5})
    error = '{"type": "result", "result": "", "is_error": true}'
    assert ClaudeCode().verdict(Output(0, error, "")).fault == "harness_error"
    cut = '{"type": "result", "result": "API Error: …", "is_error": true, "api_error": "max_output_tokens"}'
    told = ClaudeCode().verdict(Output(1, cut, ""))
    assert (told.answer, told.fault, told.notes["answer_cut"]) == ("", None, 1)
    assert ClaudeCode().verdict(Output(0, "", "")).fault == "harness_error"
    assert ClaudeCode().verdict(Output(2, "", "")).fault == "harness_exit_2"
