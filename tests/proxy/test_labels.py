"""Labels: who speaks in a turn, from structure and native marks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.proxy.trees import make_turn
from turngate.proxy.labels import PARENT_HEADERS, compacted, speaker
from turngate.proxy.splice import HistoryIndex
from turngate.proxy.turns import Turn

Message = Mapping[str, Any]

SYSTEM: Message = {"role": "system", "content": "You are a coder."}
TITLES: Message = {"role": "system", "content": "You write titles."}
ASK: Message = {"role": "user", "content": "Fix the bug."}
ANSWER: Message = {"role": "assistant", "content": "done"}
TOOLS: list[Message] = [{"type": "function", "function": {"name": "bash"}}]
FEWER: list[Message] = [{"type": "function", "function": {"name": "read"}}]


class Session:
    """Labels requests one after another, as the request path does."""

    def __init__(self) -> None:
        self.index = HistoryIndex()
        self.turns: dict[str, Turn] = {}

    def ask(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        main_tools: bool | None = None,
        answer: Message = ANSWER,
        formed: bool = False,
    ) -> str:
        """The label of the request; its turn is recorded with `answer`."""
        plan = self.index.plan(messages, tools)
        who = speaker(messages, tools, headers or {}, self.turns, plan, main_tools=main_tools, formed=formed)
        assert who.reason
        turn_id = f"t{len(self.turns)}"
        self.index.record(turn_id, plan, answer, tools)
        request = {"messages": list(plan.new_messages), "tools": None if plan.kind == "spliced" else tools}
        self.turns[turn_id] = make_turn(
            turn_id,
            len(self.turns),
            kind=plan.kind,
            base=plan.base,
            label=who.label,
            request=request,
            response=answer,
            agent=who.agent,
            parent=who.parent,
        )
        return who.label


def test_the_first_request_is_main_and_so_is_what_continues_it() -> None:
    session = Session()
    assert session.ask([SYSTEM, ASK], TOOLS) == "main"
    assert session.ask([SYSTEM, ASK, ANSWER, ASK], TOOLS) == "main"
    assert session.ask([SYSTEM, ASK], TOOLS) == "main"


def test_a_call_without_tools_beside_a_main_conversation_with_tools_is_a_side_call() -> None:
    session = Session()
    session.ask([SYSTEM, ASK], TOOLS)
    assert session.ask([TITLES, ASK]) == "side"
    assert session.ask([TITLES, ASK, ANSWER, ASK]) == "side"


def test_the_first_root_with_tools_is_main_even_when_a_title_came_first() -> None:
    session = Session()
    session.ask([TITLES, ASK])
    assert session.ask([SYSTEM, ASK], TOOLS) == "main"


@pytest.mark.parametrize("header", list(PARENT_HEADERS))
def test_a_native_mark_makes_a_subagent(header: str) -> None:
    session = Session()
    session.ask([SYSTEM, ASK], TOOLS)
    assert session.ask([SYSTEM, {**ASK, "content": "Look."}], TOOLS, {header.title(): "parent"}) == "subagent"
    assert session.ask([SYSTEM, ASK, ANSWER, ASK], TOOLS, {header: ""}) == "main"


def test_a_root_with_other_tools_or_system_is_a_subagent() -> None:
    session = Session()
    session.ask([SYSTEM, ASK], TOOLS)
    assert session.ask([SYSTEM, {**ASK, "content": "Look."}], FEWER) == "subagent"
    assert session.ask([TITLES, ASK], TOOLS) == "subagent"
    assert session.ask([TITLES, ASK, ANSWER, ASK], TOOLS) == "subagent"


def test_a_second_conversation_like_the_first_is_main() -> None:
    session = Session()
    session.ask([SYSTEM, ASK])
    assert session.ask([SYSTEM, {**ASK, "content": "Another task."}]) == "main"
    assert session.ask([TITLES, ASK]) == "side"


def test_a_history_without_its_tools_is_compacted() -> None:
    session = Session()
    session.ask([SYSTEM, ASK], TOOLS)
    assert session.ask([SYSTEM, ASK, ANSWER, {**ASK, "content": "Summarise."}]) == "compaction"


def test_without_its_tools_under_another_system_a_history_is_compacted_or_read_by_a_program() -> None:
    session = Session()
    session.ask([SYSTEM, ASK], TOOLS)
    said: Message = {"role": "assistant", "content": '{"next": "user"}'}
    question = {**ASK, "content": "Who is to speak next?"}
    assert session.ask([ASK, ANSWER, question], answer=said, formed=True) == "side"
    assert session.ask([TITLES, ASK, ANSWER, {**ASK, "content": "Sum up."}], answer=said) == "compaction"
    assert session.ask([TITLES, ASK, ANSWER, {**ASK, "content": "Sum up."}, said, ASK]) == "compaction"
    assert session.ask([SYSTEM, ASK, ANSWER, ASK], TOOLS) == "main"
    assert session.ask([{**SYSTEM, "content": "Edited."}, ASK, ANSWER, ASK, ANSWER, ASK], TOOLS) == "main"


def test_a_conversation_that_begins_like_a_subagents_is_told_by_its_own_mark() -> None:
    session = Session()
    above, below = {"x-session-id": "main"}, {"x-session-id": "child", "x-parent-session-id": "main"}
    so_far: Message = {"role": "user", "content": "So far?"}
    counted: Message = {"role": "assistant", "content": "They counted."}
    session.ask([SYSTEM, ASK], TOOLS, above)
    session.ask([SYSTEM, {**ASK, "content": "Look."}], FEWER, below)
    assert session.ask([SYSTEM, so_far, counted, ASK], FEWER, below, answer=ANSWER) == "subagent"
    assert session.ask([SYSTEM, so_far, counted, ASK, ANSWER, ASK], TOOLS, above) == "main"


CLAUDE: Mapping[str, str] = {"X-Claude-Code-Session-Id": "s", "anthropic-beta": "a-1, fallback-credit-2026-06-01"}


def test_claude_codes_summary_is_told_by_its_beta_and_what_follows_is_main_again() -> None:
    session = Session()
    session.ask([SYSTEM, ASK], TOOLS)
    assert session.ask([SYSTEM, ASK, ANSWER, {**ASK, "content": "Summarise."}], TOOLS, CLAUDE) == "compaction"
    assert session.ask([SYSTEM, ASK, {**ASK, "content": "Go on."}], TOOLS) == "main"
    assert session.ask([SYSTEM, {**ASK, "content": "Another."}], TOOLS, CLAUDE) == "main"


def test_a_break_keeps_the_label_of_what_it_rewrote() -> None:
    session = Session()
    session.ask([SYSTEM, ASK], TOOLS)
    assert session.ask([SYSTEM, ASK, {**ANSWER, "content": "edited"}, ASK], TOOLS) == "main"


def test_a_title_asked_for_first_is_a_side_call_where_the_main_conversation_is_known_to_have_tools() -> None:
    session = Session()
    assert session.ask([TITLES, ASK], main_tools=True) == "side"
    assert session.ask([SYSTEM, ASK], TOOLS, main_tools=True) == "main"


def test_a_conversation_without_tools_is_main_where_nothing_says_otherwise() -> None:
    session = Session()
    assert session.ask([SYSTEM, ASK], main_tools=False) == "main"
    assert session.ask([SYSTEM, ASK, ANSWER, ASK], main_tools=False) == "main"


CALL: Message = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls -a"}'}}],
}
RESULT: Message = {"role": "tool", "tool_call_id": "c1", "content": "a.txt"}


def test_children_in_parallel_hang_below_the_turn_that_called_for_them() -> None:
    session = Session()
    main, child, other = ({"X-Session-Id": name} for name in ("main", "child", "other"))
    session.ask([SYSTEM, ASK], TOOLS, main, answer=CALL)
    for headers in (child, other):
        below = {**headers, "X-Parent-Session-Id": "main"}
        look = {**ASK, "content": f"Look, {headers['X-Session-Id']}."}
        assert session.ask([SYSTEM, look], FEWER, below, answer=CALL) == "subagent"
        assert session.ask([SYSTEM, look, CALL, RESULT], FEWER, below) == "subagent"
    session.ask([SYSTEM, ASK, CALL, RESULT], TOOLS, main)
    turns = list(session.turns.values())
    assert [turn.agent for turn in turns] == ["main", "child", "child", "other", "other", "main"]
    assert [turn.parent for turn in turns] == [None, "t0", "t0", "t0", "t0", None]


def test_a_call_without_tools_that_quotes_the_answers_is_a_compaction() -> None:
    session = Session()
    summary: Message = {"role": "assistant", "content": "They listed a folder."}
    session.ask([SYSTEM, ASK], TOOLS, answer=CALL)
    quoting: Message = {"role": "user", "content": "user: Fix the bug.\nassistant: bash(ls -a)\ntool: a.txt"}
    assert session.ask([TITLES, quoting], answer=summary) == "compaction"
    rewritten = [SYSTEM, {**ASK, "content": "So far?"}, summary, {**ASK, "content": "Go on."}]
    assert compacted(rewritten, session.turns) is not None
    assert session.index.plan(rewritten, TOOLS).kind == "break"
    assert not compacted([SYSTEM, ASK, CALL, RESULT], session.turns)
    assert session.ask(rewritten, TOOLS) == "main"


def test_codex_names_its_compaction_and_its_subagents_in_headers() -> None:
    def headers(kind: str, thread: str, **more: str) -> dict[str, str]:
        return {"session-id": "s", "thread-id": thread, "X-Codex-Turn-Metadata": f'{{"request_kind":"{kind}"}}', **more}

    session = Session()
    calls = {**ANSWER, "tool_calls": [{"id": "c", "function": {"name": "spawn", "arguments": "{}"}}]}
    assert session.ask([SYSTEM, ASK], TOOLS, headers("turn", "s"), answer=calls) == "main"
    child = headers("turn", "t", **{"x-codex-parent-thread-id": "s"})
    assert session.ask([SYSTEM, {"role": "user", "content": "Look."}], TOOLS, child) == "subagent"
    assert (session.turns["t1"].agent, session.turns["t1"].parent) == ("t", "t0")
    history = [SYSTEM, ASK, calls, {"role": "tool", "tool_call_id": "c", "content": "x"}]
    assert (
        session.ask([*history, {"role": "user", "content": "Sum up."}], TOOLS, headers("compaction", "s"))
        == "compaction"
    )
    assert session.ask(history, TOOLS, {**headers("turn", "s"), "x-codex-turn-metadata": "broken"}) == "main"
