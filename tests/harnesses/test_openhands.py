"""Real OpenHands through a real gateway: odd tool calls, several prompts, agents below agents, a full context."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

import pytest

from tests.gateway_process import GatewayProcess
from tests.harnesses.conftest import StageMaker, TaskMaker
from tests.harnesses.test_opencode import assert_each_token_is_trained_once, call, leased_rows, recorded
from turngate.harnesses.base import Endpoint, HarnessOptions, Output, Places
from turngate.harnesses.openhands import NO_SKILLS, SETTINGS, TOO_MANY_STEPS, OpenHands
from turngate.harnesses.rollout import run_rollout
from turngate.tasks.steps import Bash, Say

Serve = Callable[..., GatewayProcess]
ONE = "echo 1 > /logs/verifier/reward.txt"
PLACES = Places(*(PurePosixPath(path) for path in ("/h", "/node", "/home", "/w")))
ENDPOINT = Endpoint("http://x/s/secret/v1", "k", "m")
ROOM = {"context_tokens": 32000}


def terminal(command: str) -> dict[str, Any]:
    """A scripted call of the shell."""
    return call("terminal", {"command": command, "security_risk": "LOW"})


@pytest.mark.harness
async def test_odd_and_parallel_calls_over_two_prompts_are_one_row_without_a_break(
    serve: Serve, make_stage: StageMaker, make_task: TaskMaker
) -> None:
    odd = '{ "timeout":1e1 ,  "command" : "echo h\\u00e9llo > a.txt", "security_risk" : "LOW" }'
    turns = [
        {"content": "  Look.\n", "tool_calls": [call("terminal", odd)]},
        {"tool_calls": [terminal("echo 1 > b.txt"), terminal("cat a.txt b.txt"), call("nonsense", '{"x":1.50}')]},
        {"tool_calls": [call("terminal", '{"command": "ls", "secur')]},
        {"tool_calls": [call("finish", {"message": "All done."})]},
        "Once more.",
    ]
    gateway = serve(turns)
    stage = make_stage(gateway, harness="openhands", group_size=2, harness_options=ROOM)
    task = make_task(
        "grep -q héllo a.txt && cat b.txt && grep -x 'Once more.' answer.txt && " + ONE,
        prompts=('Say "it", -x $HOME.', "-Again."),
    )
    result = await run_rollout(stage, task, "group")
    assert (result.outcome, result.reward) == ("scored", 1.0), result.detail
    found = recorded(gateway, result)
    assert [(turn.label, turn.kind) for turn in found] == [("main", "first"), *[("main", "spliced")] * 4]
    assert found[0].request["messages"][-1]["content"][0]["text"] == 'Say "it", -x $HOME.'
    rows = leased_rows(gateway, result)
    assert_each_token_is_trained_once(rows, found, {"main"})
    assert len(rows) == 1


@pytest.mark.harness
async def test_an_agent_below_it_is_recorded_as_one_and_its_parent_is_one_row(
    serve: Serve, make_stage: StageMaker, make_task: TaskMaker
) -> None:
    task = {"prompt": "CHILD looks", "description": "part", "subagent_type": "general-purpose", "security_risk": "LOW"}
    child = [{"tool_calls": [terminal("echo 1 > 1.txt")]}, "It is done."]
    gateway = serve({"CHILD looks": child, "": [{"content": "Split.", "tool_calls": [call("task", task)]}]})
    stage = make_stage(gateway, harness="openhands", group_size=2, harness_options=ROOM)
    result = await run_rollout(stage, make_task("cat 1.txt && " + ONE), "group")
    found = recorded(gateway, result)
    assert (result.outcome, result.reward) == ("scored", 1.0), (result.detail, [turn.response for turn in found])
    assert [turn.label for turn in found] == ["main", "subagent", "subagent", "main"]
    main = [turn for turn in found if turn.label == "main"]
    assert [turn.kind for turn in main] == ["first", "spliced"]
    assert_each_token_is_trained_once(leased_rows(gateway, result), found, {"main"})


@pytest.mark.harness
@pytest.mark.parametrize("tools", [True, False])
async def test_without_tools_and_with_another_system_prompt_it_is_a_plain_conversation(
    serve: Serve, make_stage: StageMaker, make_task: TaskMaker, tools: bool
) -> None:
    gateway = serve(["Two."])
    options = {**ROOM, "tools": tools, "subagents": False, "system_prompt": "Be short."}
    stage = make_stage(gateway, harness="openhands", group_size=2, harness_options=options)
    result = await run_rollout(stage, make_task("grep -x Two. answer.txt && " + ONE), "group")
    assert (result.outcome, result.reward) == ("scored", 1.0), result.detail
    (turn,) = recorded(gateway, result)
    assert turn.request["messages"][0]["content"][0]["text"] == "Be short."
    names = {tool["function"]["name"] for tool in turn.request["tools"] or ()}
    assert names == ({"terminal", "file_editor", "task_tracker", "finish", "think"} if tools else set())


def test_its_settings_point_at_the_gateway_and_it_condenses_only_when_asked() -> None:
    def settings(**options: Any) -> dict[str, Any]:
        return dict(json.loads(OpenHands().files(ENDPOINT, HarnessOptions(**options))[SETTINGS]))

    assert settings()["llm"]["base_url"] == ENDPOINT.base_url
    assert "condenser" not in settings()
    assert settings(compaction=True, context_tokens=9000)["condenser"]["max_tokens"] == 9000
    assert NO_SKILLS in OpenHands().files(ENDPOINT, HarnessOptions())


def test_every_prompt_is_a_word_of_its_own_and_further_ones_resume_the_conversation() -> None:
    words = OpenHands().command(PLACES, ENDPOINT, ['-a "b"', "c"], HarnessOptions())
    assert words[-2:] == ['-a "b"', "c"]
    assert "--resume --last" in words[2].partition("&&")[2]
    assert "--resume" not in words[2].partition("&&")[0]


def test_a_solution_of_several_lines_is_one_command_of_its_terminal() -> None:
    def played(command: str) -> Any:
        return OpenHands().play(Bash(command=command), HarnessOptions()).tool_calls[0].arguments["command"]

    assert played("ls") == "ls"
    assert played("cd x\nls") == "bash -c 'cd x\nls'"
    assert OpenHands().play(Say(text="Done."), HarnessOptions()).content == "Done."


def test_the_answer_is_what_it_finished_with_or_its_last_words_and_an_error_event_is_a_fault() -> None:
    def event(kind: str, **fields: Any) -> str:
        return json.dumps({"kind": kind, **fields})

    said = event("MessageEvent", source="agent", llm_message={"content": [{"type": "text", "text": "two"}]})
    heard = event("MessageEvent", source="user", llm_message={"content": [{"type": "text", "text": "one"}]})
    finish = event("ActionEvent", action={"kind": "FinishAction", "message": "done"})
    failed, long = (event("ConversationErrorEvent", code=code) for code in ("LLMError", TOO_MANY_STEPS))
    assert OpenHands().verdict(Output(0, "\n".join(["no event", said, heard]), "")).answer == "two"
    assert OpenHands().verdict(Output(0, "\n".join([said, finish]), "")).answer == "done"
    assert OpenHands().verdict(Output(0, failed, "")).fault == "harness_error"
    assert OpenHands().verdict(Output(0, long, "")).fault is None
    assert OpenHands().verdict(Output(3, said, "")).fault == "harness_exit_3"
