"""Histories by their meaning: whatever harnesses write again is the same one, any change of what is said is another."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from tests.proxy.echoes import HARNESSES, javascript
from tests.proxy.test_canonical import answers, objects, scalars
from tests.proxy.trees import make_turn
from turngate.proxy.canonical import canonical_content, chain_all, message_digest
from turngate.proxy.splice import HistoryIndex

Message = dict[str, Any]


def _same(one: Any, other: Any) -> bool:
    """Whether JavaScript could not tell two JSON values apart: it has doubles only."""
    return javascript(json.dumps(one, sort_keys=True)) == javascript(json.dumps(other, sort_keys=True))


@st.composite
def histories(draw: st.DrawFn) -> list[Message]:
    """Conversations of one to three answered turns and a new message, tool results where there were calls."""
    messages: list[Message] = [
        {"role": "system", "content": "Be."},
        {"role": "user", "content": draw(st.text(max_size=9))},
    ]
    for turn in range(draw(st.integers(1, 3))):
        answer = draw(answers())
        for number, call in enumerate(answer.get("tool_calls", ())):
            call["id"] = f"call{turn}x{number}"
        messages.append(answer)
        for call in answer.get("tool_calls", ()):
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": draw(st.text(max_size=9))})
        if not answer.get("tool_calls"):
            messages.append({"role": "user", "content": draw(st.text(max_size=9))})
    return messages


def written_again(messages: list[Message], data: st.DataObject) -> list[Message]:
    """Each answer as some harness writes it; what the others say in other clothes."""
    found: list[Message] = []
    for message in messages:
        if message["role"] == "assistant":
            harness = data.draw(st.sampled_from(HARNESSES))
            found.append(harness(message))
        elif data.draw(st.booleans()):
            part = {"type": "text", "text": message["content"], "cache_control": {"type": "ephemeral"}}
            found.append({**message, "content": [part]})
        else:
            found.append(dict(message))
    return found


def recorded(messages: list[Message]) -> HistoryIndex:
    """An index that has all answers of a conversation."""
    index = HistoryIndex()
    for at, message in enumerate(messages):
        if message["role"] == "assistant":
            index.record(f"t{at}", index.plan(messages[:at], None), message)
    return index


@given(histories(), st.data())
def test_any_harness_echo_of_a_whole_history_continues_it(messages: list[Message], data: st.DataObject) -> None:
    echo = written_again(messages, data)
    assert chain_all(echo) == chain_all(messages)
    plan = recorded(messages).plan(echo, None)
    last = max(at for at, message in enumerate(messages) if message["role"] == "assistant")
    assert (plan.kind, plan.base, len(plan.new_messages)) == ("spliced", f"t{last}", len(messages) - last - 1)


def _near(value: Any) -> Any:
    """Another value that is written as long as this one, where there is one."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return value + 1
    return ("b" if value[0] == "a" else "a") + value[1:] if isinstance(value, str) and value else "a"


@st.composite
def changed_values(draw: st.DrawFn, value: Any) -> Any:
    """A JSON value that means something else: one place of it changed."""
    if isinstance(value, dict) and value and draw(st.booleans()):
        key = draw(st.sampled_from(sorted(value)))
        rest = {name: one for name, one in value.items() if name != key}
        kind = draw(st.sampled_from(["drop", "rename", "inside"]))
        if kind == "drop":
            return rest
        return {**rest, key + "x": value[key]} if kind == "rename" else {**rest, key: draw(changed_values(value[key]))}
    if isinstance(value, dict):
        return {**value, draw(st.text(max_size=4).filter(lambda key: key not in value)): draw(scalars)}
    if isinstance(value, list) and value:
        at = draw(st.integers(0, len(value) - 1))
        return (
            [*value[:at], draw(changed_values(value[at])), *value[at + 1 :]] if draw(st.booleans()) else [*value, None]
        )
    other = draw(st.sampled_from([_near(value), draw(scalars)]))
    assume(not _same(value, other))
    return other


@given(objects, st.data())
def test_a_change_anywhere_inside_arguments_is_seen(value: dict[str, Any], data: st.DataObject) -> None:
    other = data.draw(changed_values(value))
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": json.dumps(value)}}
    one = {"role": "assistant", "content": None, "tool_calls": [call]}
    two = copy.deepcopy(one)
    two["tool_calls"][0]["function"]["arguments"] = json.dumps(other)  # type: ignore[index]
    assert chain_all([one])[-1] != chain_all([two])[-1]


def _changes(message: Message) -> list[Message]:
    """Messages that mean something else."""
    text = message["content"] or ""
    changes = [{**message, "content": text + "x"}, {**message, "role": "developer"}]
    if canonical_content(text) is not None:
        changes.append({**message, "content": ""})
    if message["role"] == "tool":
        changes.append({**message, "tool_call_id": "another"})
    for at, call in enumerate(message.get("tool_calls") or ()):
        calls, function = message["tool_calls"], call["function"]
        for other in (
            [],
            [{**call, "function": {**function, "name": function["name"] + "x"}}],
            [{**call, "function": {**function, "arguments": '{"zz": "!"}'}}],
            [{**call, "id": call["id"] + "x"}],
            [call, {**call, "id": "more"}],
        ):
            changes.append({**message, "tool_calls": [*calls[:at], *other, *calls[at + 1 :]]})
    return changes


@given(histories())
def test_each_change_of_what_a_message_says_is_another_message(messages: list[Message]) -> None:
    for message in messages:
        for other in _changes(message):
            assert message_digest(other) != message_digest(message)


@given(histories(), st.data())
def test_a_change_anywhere_in_a_history_is_never_continued_beyond_it(
    messages: list[Message], data: st.DataObject
) -> None:
    last = max(at for at, message in enumerate(messages) if message["role"] == "assistant")
    at = data.draw(st.integers(0, last))
    kind = data.draw(st.sampled_from(["change", "drop", "double", "swap"]))
    other = list(messages)
    if kind == "change":
        other[at] = data.draw(st.sampled_from(_changes(messages[at])))
    elif kind == "drop":
        del other[at]
    elif kind == "double":
        other.insert(at, messages[at])
    else:
        other[at], other[at + 1] = other[at + 1], other[at]
    assume(other)
    same = [one == two for one, two in zip(chain_all(messages), chain_all(other), strict=False)]
    told_apart = same.index(False) - 1 if False in same else min(len(messages), len(other))
    if kind == "change":
        assert told_apart == at
    plan = recorded(messages).plan(other, None)
    assert plan.kept_messages <= told_apart
    assert plan.kind != "spliced" or plan.base is None or int(plan.base[1:]) < told_apart


def test_a_turn_rebuilt_from_the_store_is_found_by_the_same_meaning() -> None:
    answer = {"role": "assistant", "content": "a", "tool_calls": []}
    turn = make_turn("t", 0, request={"messages": [{"role": "user", "content": "Hi"}]}, response=answer)
    plan = HistoryIndex.from_turns([turn]).plan(
        [{"role": "user", "content": [{"type": "text", "text": "Hi "}]}, answer, {"role": "user", "content": "Go"}],
        None,
    )
    assert (plan.kind, plan.base) == ("spliced", "t")
