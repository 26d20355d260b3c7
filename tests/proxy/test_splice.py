"""The history index: echoes continue the recorded turn, rewritten histories break with the right cause."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.proxy.echoes import HARNESSES
from tests.proxy.trees import make_turn
from turngate.proxy.canonical import chain_all, tools_digest
from turngate.proxy.splice import BREAK_CAUSES, HistoryIndex, Plan
from turngate.proxy.turns import BrokenTree, Turn, by_id, full_messages

Message = Mapping[str, Any]

SYSTEM: Message = {"role": "system", "content": "You are a coder."}
ASK: Message = {"role": "user", "content": "Fix the bug."}
TOOLS: list[Message] = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]


def call(n: int, arguments: str = '{"command": "ls", "n": 1e3}') -> Message:
    """An assistant turn with one tool call."""
    function = {"name": "bash", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": f"call{n}", "function": function}]}


def result(n: int, text: str = "ok") -> Message:
    """The result of call `n`."""
    return {"role": "tool", "tool_call_id": f"call{n}", "content": text}


def say(text: str) -> Message:
    """An assistant turn of text."""
    return {"role": "assistant", "content": text}


def user(text: str) -> Message:
    """A user message."""
    return {"role": "user", "content": text}


@dataclass
class Talk:
    """A session as the request path drives it: plan, record, keep the turn."""

    index: HistoryIndex = field(default_factory=HistoryIndex)
    turns: list[Turn] = field(default_factory=list)

    def take(self, messages: Sequence[Message], response: Message, tools: Sequence[Message] | None = TOOLS) -> Plan:
        """One turn."""
        plan = self.index.plan(messages, tools)
        turn_id = f"t{len(self.turns)}"
        self.index.record(turn_id, plan, response, tools)
        request = {"messages": list(plan.new_messages), "tools": None if plan.kind == "spliced" else tools}
        self.turns.append(
            make_turn(
                turn_id,
                len(self.turns),
                kind=plan.kind,
                base=plan.base,
                break_cause=plan.break_cause,
                request=request,
                response=response,
            )
        )
        return plan


def three_turns() -> Talk:
    """main: call 0, call 1, call 2, each with its result asked on."""
    talk = Talk()
    messages = [SYSTEM, ASK]
    for n in range(3):
        talk.take(messages, call(n))
        messages = [*messages, call(n), result(n)]
    return talk


HISTORY: list[Message] = [SYSTEM, ASK, call(0), result(0), call(1), result(1), call(2), result(2)]


def test_the_first_request_begins_a_root() -> None:
    plan = HistoryIndex().plan([SYSTEM, ASK], TOOLS)
    assert (plan.kind, plan.base, list(plan.new_messages)) == ("first", None, [SYSTEM, ASK])


@given(st.lists(st.sampled_from(HARNESSES), min_size=3, max_size=3))
def test_an_echoed_history_continues_the_deepest_turn(echo: list[Any]) -> None:
    history = [echo[m // 2 - 1](one) if one["role"] == "assistant" else one for m, one in enumerate(HISTORY)]
    plan = three_turns().index.plan(history, TOOLS)
    assert (plan.kind, plan.base, list(plan.new_messages)) == ("spliced", "t2", [result(2)])


def test_several_new_messages_follow_one_turn() -> None:
    new = [result(2), user("hurry"), user("please")]
    plan = three_turns().index.plan([*HISTORY[:-1], *new], TOOLS)
    assert (plan.kind, plan.base, list(plan.new_messages)) == ("spliced", "t2", new)


def test_an_identical_request_is_a_new_sample_of_the_same_prompt() -> None:
    talk = three_turns()
    again = talk.take(HISTORY[:4], call(7))
    assert (again.kind, again.base, list(again.new_messages), again.repeats) == ("spliced", "t0", [result(0)], "t1")
    root = talk.index.plan(HISTORY[:2], TOOLS)
    assert (root.kind, root.base, root.repeats) == ("first", None, "t0")
    assert talk.index.plan([*HISTORY[:4], call(7), result(7)], TOOLS).base == "t3"
    assert talk.index.plan(HISTORY[:6], TOOLS).base == "t1"


def test_one_more_sample_of_a_break_is_no_second_break() -> None:
    talk = three_turns()
    rewritten = [*HISTORY[:4], call(1, "{}"), result(1)]
    assert talk.take(rewritten, say("a")).kind == "break"
    again = talk.index.plan(rewritten, TOOLS)
    assert (again.kind, again.repeats) == ("first", "t3")


def test_a_fork_from_one_turn_is_two_continuations() -> None:
    talk = Talk()
    talk.take([SYSTEM, ASK], call(0))
    for text in ("left", "right"):
        plan = talk.take([SYSTEM, ASK, call(0), result(0), user(text)], say(text))
        assert (plan.kind, plan.base) == ("spliced", "t0")


@pytest.mark.parametrize(
    ("history", "tools", "cause", "base"),
    [
        (HISTORY, [*TOOLS, *TOOLS], "tools_changed", "t2"),
        ([*HISTORY[:-1], result(2), user("summarise")], None, "tools_changed", "t2"),
        ([user("other system"), *HISTORY[1:]], TOOLS, "system_changed", "t2"),
        ([{**SYSTEM, "content": "12:31"}, *HISTORY[1:]], TOOLS, "system_changed", "t2"),
        (HISTORY[1:], TOOLS, "system_changed", "t2"),
        ([SYSTEM, user("Fix it. Note: be quick."), *HISTORY[2:]], TOOLS, "message_edited", "t2"),
        ([*HISTORY[:3], result(0, "[cleared]"), *HISTORY[4:]], TOOLS, "message_edited", "t2"),
        ([*HISTORY[:4], call(1, '{"command": "rm"}'), *HISTORY[5:]], TOOLS, "tool_call_rewritten", "t1"),
        ([*HISTORY[:6], call(2, "{}"), result(2)], TOOLS, "tool_call_rewritten", "t2"),
        ([*HISTORY[:6], {**call(2), "content": "So."}, result(2)], TOOLS, "content_edited", "t2"),
        ([*HISTORY[:6], user("no valid call")], TOOLS, "turn_dropped", "t2"),
        ([*HISTORY[:2], *HISTORY[4:]], TOOLS, "turn_dropped", "t0"),
        ([*HISTORY[:4], result(0), *HISTORY[4:]], TOOLS, "message_edited", "t1"),
        ([SYSTEM, user("A note. Fix the bug.")], TOOLS, "message_edited", "t2"),
        (HISTORY[:5], TOOLS, "no_new_message", "t1"),
    ],
)
def test_a_rewritten_history_breaks(history: list[Message], tools: list[Message] | None, cause: str, base: str) -> None:
    plan = three_turns().index.plan(history, tools)
    assert (plan.kind, plan.break_cause, plan.base) == ("break", cause, base)
    assert list(plan.new_messages) == history
    assert cause in BREAK_CAUSES


def test_a_break_names_the_deepest_turn_that_still_stands() -> None:
    plan = three_turns().index.plan([*HISTORY[:4], call(1, "{}"), result(1)], TOOLS)
    assert (plan.base, plan.kept, plan.kept_messages) == ("t1", "t0", 3)


def test_after_a_break_the_new_history_is_continued() -> None:
    talk = three_turns()
    rewritten = [*HISTORY[:6], call(2, "{}"), result(2)]
    talk.take(rewritten, call(3))
    plan = talk.index.plan([*rewritten, call(3), result(3)], TOOLS)
    assert (plan.kind, plan.base) == ("spliced", "t3")


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "You write titles."}, ASK],
        [SYSTEM, user("Search the docs for it.")],
        [user("Hello")],
        [user("Name it."), say("Like this."), user("Go on.")],
    ],
)
def test_other_conversations_of_the_session_begin_roots_of_their_own(messages: list[Message]) -> None:
    plan = three_turns().index.plan(messages, TOOLS)
    assert (plan.kind, plan.base, plan.break_cause) == ("first", None, None)


def test_an_empty_answer_proves_nothing() -> None:
    talk = Talk()
    talk.take([SYSTEM, ASK], say(""))
    assert talk.index.plan([user("Hi"), say(""), user("there")], TOOLS).kind == "first"


def test_reasoning_counts_until_the_next_user_message() -> None:
    talk = Talk()
    thinking = {**call(0), "reasoning": "hm"}
    talk.take([SYSTEM, ASK], thinking)
    talk.take([SYSTEM, ASK, call(0), result(0)], say("done"))
    talk.take([SYSTEM, ASK, call(0), result(0), say("done"), user("more")], say("<think>x</think> yes"))
    assert [sorted(talk.index.reasoning(turn)) for turn in ("t0", "t1", "t2")] == [["field"], ["field"], ["inline"]]


def test_reasoning_that_a_harness_echoes_in_a_new_root_counts() -> None:
    talk = Talk()
    talk.take([ASK, {**call(0), "reasoning_content": "hm"}, result(0)], say("done"))
    assert talk.index.reasoning("t0")
    talk.take([ASK, {**call(0), "reasoning_content": "hm"}, result(0), say("old"), user("next")], say("done"))
    assert not talk.index.reasoning("t1")


# -- properties over random sessions ------------------------------------------------------------------------------

moves = st.lists(
    st.tuples(
        st.sampled_from(["continue", "again", "fork", "edit", "drop", "tools", "side"]),
        st.integers(0, 10**6),
        st.sampled_from(HARNESSES),
    ),
    max_size=12,
)


def play(script: Sequence[tuple[str, int, Any]]) -> tuple[Talk, list[list[Message]]]:
    """A session in which every move picks an earlier turn; returns it and every request made."""
    talk, requests, answers = Talk(), [], []

    def ask(messages: list[Message], tools: list[Message] | None = TOOLS) -> None:
        n = len(requests)
        answer = call(n, json.dumps({"n": n, "at": 1.5})) if n % 3 else say(f"answer {n}")
        talk.take(messages, answer, tools)
        requests.append(messages)
        answers.append(answer)

    ask([SYSTEM, ASK])
    for move, pick, echo in script:
        n = pick % len(requests)
        whole = [*requests[n], echo(answers[n])]
        if move == "again":
            ask(requests[n])
        elif move == "fork":
            ask([*whole, user(f"fork {len(requests)}")])
        elif move == "edit":
            ask([*requests[n], say(f"never said {len(requests)}"), user("on")])
        elif move == "drop":
            ask([*requests[n], user(f"note {len(requests)}")])
        elif move == "side":
            ask([{"role": "system", "content": f"side {len(requests)}"}, ASK])
        else:
            ask([*whole, result(n)], TOOLS if move == "continue" else None)
    return talk, requests


@given(moves)
def test_every_stored_turn_gives_back_its_messages(script: list[tuple[str, int, Any]]) -> None:
    talk, requests = play(script)
    known = by_id(talk.turns)
    rebuilt = HistoryIndex()
    for turn, request in zip(talk.turns, requests, strict=True):
        tools = TOOLS if talk.index._turns[turn.id].tools_key == talk.index._turns["t0"].tools_key else None
        rebuilt.record(turn.id, rebuilt.plan(full_messages(known, turn), tools), turn.response)
        assert rebuilt._turns[turn.id].end == talk.index._turns[turn.id].end
        assert len(full_messages(known, turn)) == len(request)


@given(moves, st.integers(0, 10**6), st.sampled_from(HARNESSES))
def test_a_rebuilt_index_plans_the_same(script: list[tuple[str, int, Any]], pick: int, echo: Any) -> None:
    talk, requests = play(script)
    rebuilt = HistoryIndex.from_turns(talk.turns[::-1])
    n = pick % len(requests)
    for messages in (requests[n], [*requests[n], echo(talk.turns[n].response), result(n)], [*requests[n], user("x")]):
        for tools in (TOOLS, None):
            one, two = talk.index.plan(messages, tools), rebuilt.plan(messages, tools)
            assert (one.kind, one.base, one.break_cause, one.key) == (two.kind, two.base, two.break_cause, two.key)


@given(moves, st.sampled_from(HARNESSES))
def test_every_turn_can_be_continued_by_any_harness(script: list[tuple[str, int, Any]], echo: Any) -> None:
    talk, requests = play(script)
    for turn, request in zip(talk.turns, requests, strict=True):
        tools = TOOLS if talk.index._turns[turn.id].tools_key == talk.index._turns["t0"].tools_key else None
        plan = talk.index.plan([*request, echo(turn.response), user("a new message")], tools)
        assert (plan.kind, plan.base, list(plan.new_messages)) == ("spliced", turn.id, [user("a new message")])


def test_a_store_that_lost_a_base_is_refused() -> None:
    talk = three_turns()
    with pytest.raises(BrokenTree, match="t0"):
        HistoryIndex.from_turns(talk.turns[1:])


sayings = st.sampled_from(
    [user("a"), user("b"), say("x"), call(1), call(1, '{"command":"ls"}'), result(1), {"role": "user"}]
)


@given(st.lists(st.tuples(st.lists(sayings, min_size=1, max_size=5), st.sampled_from([None, TOOLS, []])), max_size=6))
def test_what_the_last_request_said_changes_no_plan(asked: list[tuple[list[Message], Any]]) -> None:
    index = HistoryIndex()
    for messages, tools in asked:
        copied = json.loads(json.dumps(messages))
        plan = index.plan(copied, tools)
        assert (plan.messages, list(plan.heads)) == (messages, chain_all(messages))
        assert plan.tools_key == tools_digest(tools)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 2) | st.sampled_from([0.0, 1.0, "", "a"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", "b", "c"]), inner, max_size=3),
    max_leaves=5,
)
MESSAGES = st.lists(st.dictionaries(st.sampled_from(["role", "content", "tool_calls"]), JSON, max_size=3), max_size=4)


@given(before=MESSAGES, now=MESSAGES)
def test_shared_messages_are_written_as_the_request_had_them(before: list[Message], now: list[Message]) -> None:
    index = HistoryIndex()
    index._last = (before, ())
    for messages in (now, json.loads(json.dumps([*before, *now]))):
        assert json.dumps(index.shared(messages)) == json.dumps(messages)


def test_a_history_that_comes_again_is_held_once() -> None:
    index, history = HistoryIndex(), [SYSTEM, ASK, call(1), result(1)]
    index.plan(history, TOOLS)
    again = json.loads(json.dumps([*history, say("done")]))
    shared = index.shared(again)
    assert all(one is other for one, other in zip(shared, history, strict=False))
    reordered = [dict(reversed(SYSTEM.items())), *history[1:]]
    assert index.shared(reordered)[0] is reordered[0]
