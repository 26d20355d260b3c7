"""Real OpenCode through a real gateway: titles, odd tool calls, agents below agents, compaction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

import pytest

from tests.gateway_process import GatewayProcess
from tests.harnesses.conftest import StageMaker, TaskMaker
from turngate.harnesses.base import Endpoint, HarnessOptions, Output, Places
from turngate.harnesses.opencode import OpenCode
from turngate.harnesses.rollout import Result, run_rollout
from turngate.proxy import wire
from turngate.proxy.rows import build_rows
from turngate.proxy.store.reader import StoreReader
from turngate.proxy.turns import Turn

Serve = Callable[..., GatewayProcess]
ONE = "cat answer.txt; echo 1 > /logs/verifier/reward.txt"


def call(tool: str, arguments: Any) -> dict[str, Any]:
    """A scripted tool call; arguments as text are kept as they are written."""
    return {"name": tool, "arguments": arguments}


def bash(command: str) -> dict[str, Any]:
    """A scripted call of the shell."""
    return {"tool_calls": [call("bash", {"command": command, "description": "x"})]}


def recorded(gateway: GatewayProcess, result: Result) -> list[Turn]:
    """The rollout's turns."""
    with StoreReader(gateway.store) as reader:
        return reader.turns(result.id or "")


def leased_rows(gateway: GatewayProcess, result: Result) -> list[wire.WireRow]:
    """The rows of the one rollout that was played, leased with a second one that never spoke."""
    new = wire.NewRollout(task=result.task, group=result.group, group_size=2)
    gateway.client.finish_rollout(gateway.client.create_rollout(new).id, wire.FinishRollout(reward=0.0))
    policy = gateway.client.status().policies[0].policy
    groups = gateway.client.lease(wire.NewLease(policy=policy)).groups
    return [row for rollout in groups[0].rollouts for row in rollout.rows]


def assert_each_token_is_trained_once(rows: list[wire.WireRow], turns: list[Turn], labels: set[str]) -> None:
    """Every sampled token of the trained labels is in exactly one row, and no other token is."""
    trained = [turn for turn in turns if turn.label in labels]
    assert Counter(name for row in rows for name in row.turns) == Counter(turn.id for turn in trained)
    assert sum(int(row.unpack().mask.sum()) for row in rows) == sum(len(turn.completion_ids) for turn in trained)


@pytest.mark.harness
async def test_a_title_is_a_side_call_and_odd_tool_calls_break_only_where_opencode_replaces_them(
    serve: Serve, make_stage: StageMaker, make_task: TaskMaker
) -> None:
    odd = '{ "timeout":1e4 ,  "command" : "echo h\\u00e9llo > a.txt", "description":"x" }'
    turns = [
        {"content": "  Look.\n", "tool_calls": [call("bash", odd)]},
        {"tool_calls": [call("nonsense", '{"x":1}')]},
        {"tool_calls": [call("bash", '{"command": "ls", "description"')]},
        "All done.",
    ]
    gateway = serve({"title generator": ["A title"], "": turns})
    stage = make_stage(
        gateway, harness="opencode", group_size=2, harness_options={"context_tokens": 32000, "side_calls": True}
    )
    task = make_task("grep -q héllo a.txt && " + ONE, prompts=('Say "it", -x $HOME.', "Again."))
    result = await run_rollout(stage, task, "group")
    assert (result.outcome, result.reward) == ("scored", 1.0), result.detail
    found = recorded(gateway, result)
    assert Counter(turn.label for turn in found) == {"side": 1, "main": 5}
    title = next(turn for turn in found if turn.label == "side")
    assert title.label_reason == "no tools beside a main conversation with tools"
    assert {turn.agent for turn in found} == {title.agent}
    main = [turn for turn in found if turn.label == "main"]
    assert main[0].request["messages"][-1]["content"] == 'Say "it", -x $HOME.'
    assert [turn.kind for turn in main] == ["first", "spliced", "break", "break", "spliced"]
    assert {turn.break_cause for turn in main if turn.kind == "break"} == {"tool_call_rewritten"}
    assert_each_token_is_trained_once(leased_rows(gateway, result), found, {"main"})


@pytest.mark.harness
async def test_children_in_parallel_are_recorded_below_their_parent_and_trained_where_the_setting_says(
    serve: Serve, make_stage: StageMaker, make_task: TaskMaker
) -> None:
    def part(number: int) -> dict[str, Any]:
        words = {"description": f"part {number}", "prompt": f"CHILD{number} looks", "subagent_type": "general"}
        return call("task", words)

    script: dict[str, list[Any]] = {f"CHILD{n} looks": [bash(f"echo {n} > {n}.txt"), f"{n} is done"] for n in (1, 2)}
    # The parent's later prompts hold the children's words too, so its last answer must be that of any of them.
    gateway = serve({**script, "": [{"content": "Split.", "tool_calls": [part(1), part(2)]}]})
    stage = make_stage(
        gateway,
        harness="opencode",
        group_size=2,
        harness_options={"context_tokens": 32000},
        trained_labels=["main", "subagent"],
    )
    result = await run_rollout(stage, make_task("cat 1.txt 2.txt && " + ONE), "group")
    assert (result.outcome, result.reward) == ("scored", 1.0), result.detail
    found = recorded(gateway, result)
    main = [turn for turn in found if turn.label == "main"]
    children = [turn for turn in found if turn.label == "subagent"]
    assert (len(main), len(children), len({turn.agent for turn in children})) == (2, 4, 2)
    assert {turn.parent for turn in children} == {main[0].id}
    assert {turn.label_reason for turn in children} == {"header x-parent-session-id"}
    assert [turn.kind for turn in main] == ["first", "spliced"]
    rows = leased_rows(gateway, result)
    assert_each_token_is_trained_once(rows, found, {"main", "subagent"})
    assert len(rows) == 3
    main_rows = [wire.WireRow.pack(row) for row in build_rows(found, ["main"])]
    assert_each_token_is_trained_once(main_rows, found, {"main"})
    assert len(main_rows) == 1


@pytest.mark.harness
async def test_compaction_is_labelled_and_what_follows_it_is_a_break_of_that_cause(
    serve: Serve, make_stage: StageMaker, make_task: TaskMaker
) -> None:
    gateway = serve(
        {
            "context summarization agent": ["They counted to 700."],
            "": [bash("seq 1 700"), bash("echo hi"), bash("echo ho"), "Done."],
        }
    )
    options = {"context_tokens": 9000, "compaction": True}
    stage = make_stage(gateway, harness="opencode", group_size=2, harness_options=options)
    result = await run_rollout(stage, make_task(ONE), "group")
    assert (result.outcome, result.reward) == ("scored", 1.0), result.detail
    found = recorded(gateway, result)
    assert Counter(turn.label for turn in found)["compaction"] == 1
    assert [turn.break_cause for turn in found if turn.kind == "break"] == ["history_compacted"]
    assert_each_token_is_trained_once(leased_rows(gateway, result), found, {"main"})


def test_titles_and_compaction_are_off_unless_asked_for() -> None:
    endpoint = Endpoint("http://x/v1", "k", "m")
    (config,) = OpenCode().files(endpoint, HarnessOptions()).values()
    assert '"compaction": {"auto": false' in config
    assert '"title": {"disable": true}' in config
    places = Places(*(PurePosixPath(path) for path in ("/h", "/node", "/home", "/w")))
    words = OpenCode().command(places, endpoint, ['-a "b"', "c"], HarnessOptions())
    assert words[-2:] == ['-a "b"', "c"]
    assert "--title" in words[2].partition("&&")[0]


def test_an_error_event_is_a_fault_and_the_answer_is_the_text_of_the_last_step() -> None:
    def event(kind: str, **more: object) -> str:
        return str({"type": kind, **more}).replace("'", '"')

    events = [event("step_start"), event("text", part={"text": "one"}), event("step_start")]
    events += ["not json", event("text", part={"text": "two"})]
    assert OpenCode().verdict(Output(0, "\n".join(events), "")).answer == "two"
    assert OpenCode().verdict(Output(0, event("error"), "")).fault == "harness_error"
    assert OpenCode().verdict(Output(3, "", "")).fault == "harness_exit_3"
