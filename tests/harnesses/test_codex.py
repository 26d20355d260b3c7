"""Real Codex through a real gateway, over Responses: odd tool calls, parallel ones, agents below agents, compaction."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

import pytest

from tests.fake_engine.settings import FakeSettings
from tests.gateway_process import GatewayProcess
from tests.harnesses.conftest import StageMaker, TaskMaker
from tests.harnesses.test_opencode import assert_each_token_is_trained_once, call, leased_rows, recorded
from turngate.harnesses.base import Endpoint, HarnessOptions, Output, Places
from turngate.harnesses.codex import CUT, Codex
from turngate.harnesses.rollout import run_rollout
from turngate.proxy.verify import verify_store

Serve = Callable[..., GatewayProcess]
ONE = "echo 1 > /logs/verifier/reward.txt"
PLACES = Places(*(PurePosixPath(path) for path in ("/h", "/node", "/home", "/w")))
ENDPOINT = Endpoint("http://x/s/secret/v1", "k", "m")


def shell(command: str) -> dict[str, Any]:
    """A scripted call of the shell."""
    return call("exec_command", {"cmd": command})


@pytest.mark.harness
async def test_six_turns_of_odd_and_parallel_calls_are_one_exact_row(
    serve: Serve, make_stage: StageMaker, make_task: TaskMaker
) -> None:
    odd = '{ "yield_time_ms":1000 ,  "cmd" : "echo h\\u00e9llo > a.txt", "big": 12345678901234567890 }'
    turns = [
        {"content": "  Look.\n", "tool_calls": [call("exec_command", odd)]},
        {"tool_calls": [shell("echo 1 > b.txt"), shell("sleep 0.3; echo 2 > c.txt"), shell("ls")]},
        {"tool_calls": [call("nonsense", '{"x":1.50}')]},
        {"tool_calls": [call("exec_command", '{"cmd": "ls", ')]},
        {"content": "All done.", "tool_calls": []},
        "Once more.",
    ]
    gateway = serve(turns)
    stage = make_stage(gateway, harness="codex", group_size=2)
    task = make_task("grep -q héllo a.txt && cat b.txt c.txt && " + ONE, prompts=('Say "it", -x $HOME.', "-Again."))
    result = await run_rollout(stage, task, "group")
    assert (result.outcome, result.reward) == ("scored", 1.0), result.detail
    found = recorded(gateway, result)
    assert Counter(turn.label for turn in found) == {"main": 6}
    assert [(turn.kind, turn.break_cause) for turn in found] == [("first", None), *[("spliced", None)] * 5]
    assert len({turn.agent for turn in found}) == 1
    rows = leased_rows(gateway, result)
    assert_each_token_is_trained_once(rows, found, {"main"})
    assert len(rows) == 1
    report = verify_store(gateway.store)
    assert (report.problems, report.rows) == ([], report.exact_rows)


def test_the_configuration_is_toml_and_compaction_is_off_unless_asked_for() -> None:
    def config(**options: Any) -> dict[str, Any]:
        return tomllib.loads(Codex().files(ENDPOINT, HarnessOptions(**options))[".codex/config.toml"])

    assert config()["model_providers"]["turngate"]["base_url"] == ENDPOINT.base_url
    assert config()["model_context_window"] > 10**8
    assert config(compaction=True, context_tokens=9000)["model_context_window"] == 9000
    assert config(tools=False)["features"]["shell_tool"] is False
    assert config(tools=False)["agents"] == {"enabled": False}


def test_every_prompt_is_a_word_of_its_own() -> None:
    words = Codex().command(PLACES, ENDPOINT, ['-a "b"', "c"], HarnessOptions(system_prompt="Be brief."))
    assert words[-2:] == ['-a "b"', "c"]
    assert "resume --last" in words[2].partition("&&")[2]
    assert Codex().files(ENDPOINT, HarnessOptions(system_prompt="Be brief."))[".codex/system.md"] == "Be brief."


def test_the_answer_is_the_last_message_and_only_the_token_limit_may_fail_a_turn() -> None:
    def events(*more: dict[str, Any]) -> str:
        said = [{"type": "item.completed", "item": {"type": "agent_message", "text": text}} for text in ("one", "two")]
        return "\n".join(["not json", *map(json.dumps, (*said, *more))])

    failed = {"type": "turn.failed", "error": {"message": "stream error"}}
    cut = {"type": "turn.failed", "error": {"message": f"Incomplete response returned, reason: {CUT}"}}
    assert Codex().verdict(Output(0, events(), "")).answer == "two"
    assert Codex().verdict(Output(1, events(failed), "")).fault == "harness_exit_1"
    assert Codex().verdict(Output(0, events(failed), "")).fault == "harness_error"
    assert Codex().verdict(Output(1, events(cut), "")).notes == {"answer_cut": 1}


@pytest.mark.harness
async def test_children_are_recorded_below_their_parent_and_called_by_their_namespace(
    serve: Serve, make_stage: StageMaker, make_task: TaskMaker
) -> None:
    spawn = {"content": "Split.", "tool_calls": [call("multi_agent_v1__spawn_agent", {"message": "CHILD looks"})]}
    # The parent's later prompts hold the child's words too, so they share these answers.
    both = [{"tool_calls": [shell("echo 1 > 1.txt")]}, {"tool_calls": [shell("sleep 1")]}, "It is done."]
    gateway = serve({"CHILD looks": both, "": [spawn]})
    stage = make_stage(gateway, harness="codex", group_size=2)
    result = await run_rollout(stage, make_task("cat 1.txt && " + ONE), "group")
    assert (result.outcome, result.reward) == ("scored", 1.0), result.detail
    found = recorded(gateway, result)
    main = [turn for turn in found if turn.label == "main"]
    children = [turn for turn in found if turn.label == "subagent"]
    assert main[0].response["tool_calls"][0]["function"]["name"] == "multi_agent_v1__spawn_agent"
    assert [turn.kind for turn in main] == ["first", "spliced", "spliced"]
    assert children
    assert {turn.label_reason for turn in children} == {"header x-codex-parent-thread-id"}
    # The parent goes on at once, so its next call may be the last one when the child's first answer is kept.
    assert {turn.parent for turn in children} <= {turn.id for turn in main}
    assert len({turn.agent for turn in children}) == 1
    assert {turn.agent for turn in main}.isdisjoint({turn.agent for turn in children})
    assert_each_token_is_trained_once(leased_rows(gateway, result), found, {"main"})


@pytest.mark.harness
async def test_compaction_is_labelled_and_what_follows_it_is_a_break_of_that_cause(
    serve: Serve, make_stage: StageMaker, make_task: TaskMaker
) -> None:
    gateway = serve(
        {
            "CONTEXT CHECKPOINT COMPACTION": ["They counted to 1200."],
            "They counted to 1200.": ["Done."],
            "": [{"tool_calls": [shell("seq 1 1200")]}, {"tool_calls": [shell("echo hi")]}],
        }
    )
    options = {"context_tokens": 9000, "compaction": True}
    stage = make_stage(gateway, harness="codex", group_size=2, harness_options=options)
    result = await run_rollout(stage, make_task(ONE), "group")
    assert (result.outcome, result.reward) == ("scored", 1.0), result.detail
    found = recorded(gateway, result)
    assert [turn.label for turn in found] == ["main", "compaction", "main"]
    assert found[1].label_reason == "header x-codex-turn-metadata"
    assert [turn.break_cause for turn in found] == [None, "tools_changed", "history_compacted"]
    assert_each_token_is_trained_once(leased_rows(gateway, result), found, {"main"})


@pytest.mark.harness
async def test_an_answer_cut_by_the_limit_ends_the_run_and_is_scored(
    serve: Serve, make_stage: StageMaker, make_task: TaskMaker
) -> None:
    gateway = serve(["word " * 40])
    stage = make_stage(gateway, harness="codex", group_size=2, sampling={"max_tokens": 8})
    result = await run_rollout(stage, make_task(ONE), "group")
    assert (result.outcome, result.reward) == ("scored", 1.0), result.detail
    found = recorded(gateway, result)
    assert [(turn.finish_reason, turn.kind) for turn in found] == [("length", "first")]


@pytest.mark.harness
async def test_a_full_context_ends_the_run_at_once(serve: Serve, make_stage: StageMaker, make_task: TaskMaker) -> None:
    gateway = serve([{"tool_calls": [shell("seq 1 1200")]}], settings=FakeSettings(max_model_len=8000))
    result = await run_rollout(make_stage(gateway, harness="codex", group_size=2), make_task(ONE), "group")
    assert (result.outcome, result.reward) == ("scored", 1.0), result.detail
    assert len(recorded(gateway, result)) == 1
    assert gateway.client.rollout(result.id or "").metrics["flags"] == ["context_overflow"]
