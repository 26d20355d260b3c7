"""Labels: who speaks in a turn, from structure and native marks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.proxy.trees import make_turn
from turngate.proxy.labels import SUBAGENT_HEADERS, label
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
    ) -> str:
        """The label of the request; its turn is recorded with the answer `done`."""
        plan = self.index.plan(messages, tools)
        found, reason = label(messages, tools, headers or {}, self.turns, plan)
        assert reason
        turn_id = f"t{len(self.turns)}"
        self.index.record(turn_id, plan, ANSWER, tools)
        request = {"messages": list(plan.new_messages), "tools": None if plan.kind == "spliced" else tools}
        self.turns[turn_id] = make_turn(
            turn_id, len(self.turns), kind=plan.kind, base=plan.base, label=found, request=request, response=ANSWER
        )
        return found


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


@pytest.mark.parametrize("header", SUBAGENT_HEADERS)
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


def test_a_break_keeps_the_label_of_what_it_rewrote() -> None:
    session = Session()
    session.ask([SYSTEM, ASK], TOOLS)
    assert session.ask([SYSTEM, ASK, {**ANSWER, "content": "edited"}, ASK], TOOLS) == "main"
