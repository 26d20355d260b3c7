"""Items to messages and back: what an agent may do to an echo matches, and any change of what it says does not."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.proxy.echoes import javascript
from turngate.proxy.ask import Answer, Usage
from turngate.proxy.canonical import chain_all
from turngate.proxy.dialects.responses import Responses, parse
from turngate.proxy.dialects.responses_input import chat_messages, reasoning_of, reasoning_token
from turngate.proxy.ids import uuid7

TOOLS = [
    {"type": "function", "name": "read"},
    {"type": "namespace", "name": "crm", "tools": [{"type": "function", "name": "find"}]},
    {"type": "custom", "name": "patch"},
]
Message = dict[str, Any]
Items = list[dict[str, Any]]

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-1e6, 1e6, width=32) | words,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(words, inner, max_size=2),
    max_leaves=4,
)
arguments = st.dictionaries(words, values, max_size=3).map(lambda one: orjson.dumps(one).decode()) | st.sampled_from(
    ['{"a": ', "", '{ "x" : 1e3 }', '{"input": "a\\nb"}', '{"input": 3}']
)
calls = st.tuples(st.sampled_from(["read", "crm__find", "patch", "unknown"]), arguments)


@st.composite
def answers(draw: st.DrawFn) -> Message:
    """A sampled turn in chat form."""
    message: Message = {"role": "assistant", "content": draw(words)}
    if thought := draw(words):
        message["reasoning"] = thought
    ids = itertools.count(draw(st.integers(0, 10**6)))
    if made := draw(st.lists(calls, max_size=3)):
        message["tool_calls"] = [
            {"id": f"call{next(ids)}", "type": "function", "function": {"name": name, "arguments": text}}
            for name, text in made
        ]
    return message


def body(items: Any) -> bytes:
    return orjson.dumps({"input": items, "tools": TOOLS, "include": ["reasoning.encrypted_content"]})


def sent(message: Message) -> Items:
    """The items of an answer."""
    ask = parse(body("Hi"), training=True)
    answer = Answer(message, "stop", Usage(1, 1))
    output: Items = Responses().completion(uuid7(1), "m", 0, ask, answer)["output"]
    return output


def results(items: Items) -> Items:
    made = [item for item in items if item["type"].endswith("call")]
    return [{"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "ok"} for item in made]


def streamed(message: Message) -> Items:
    """The items at the end of a stream that brings the message in pieces."""
    events = Responses().events(uuid7(1), "m", 0, parse(body("Hi"), training=True))
    deltas: list[Message] = [{"role": "assistant", "content": ""}]
    deltas += [{"reasoning": char} for char in message.get("reasoning", "")]
    deltas += [{"content": char} for char in message["content"] or ""]
    for i, call in enumerate(message.get("tool_calls", ())):
        name, text = call["function"]["name"], call["function"]["arguments"]
        deltas.append({"tool_calls": [{"index": i, "id": call["id"], "function": {"name": name, "arguments": ""}}]})
        deltas += [{"tool_calls": [{"index": i, "function": {"arguments": char}}]} for char in text]
    out = b"".join(events.delta(delta) for delta in deltas) + events.end(Answer(message, "stop", Usage(1, 1)))
    found = [orjson.loads(line[6:]) for line in out.splitlines() if line.startswith(b"data: ")]
    done = {one["output_index"]: one["item"] for one in found if one["type"] == "response.output_item.done"}
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    assert [done[i] for i in range(len(done))] == found[-1]["response"]["output"]
    items: Items = found[-1]["response"]["output"]
    return items


def _drop(*keys: str) -> Callable[[Items], Items]:
    return lambda items: [{key: value for key, value in item.items() if key not in keys} for item in items]


def _other_json(items: Items) -> Items:
    def again(text: str) -> str:
        try:
            return javascript(text)
        except ValueError:
            return text

    return [{**item, "arguments": again(item["arguments"])} if "arguments" in item else item for item in items]


def _text_as_string(items: Items) -> Items:
    return [{**item, "content": item["content"][0]["text"]} if item["type"] == "message" else item for item in items]


def _results_between(items: Items) -> Items:
    """Every call followed at once by its result, as some agents keep them."""
    return [one for item in items for one in (item, *results([item]))]


ECHOES: list[Callable[[Items], Items]] = [
    lambda items: items,
    _drop("id"),
    _drop("status", "content_index"),
    lambda items: [item for item in items if item["type"] != "reasoning"],
    lambda items: [{**item, "content": None} if item["type"] == "reasoning" else item for item in items],
    lambda items: [item for item in items if item["type"] != "message" or item["content"][0]["text"].strip()],
    _other_json,
    _text_as_string,
]


@given(answers())
def test_a_stream_and_a_whole_answer_are_the_same_items(message: Message) -> None:
    def plain(items: Items) -> Items:
        return [{key: value for key, value in item.items() if key != "id"} for item in items]

    assert plain(streamed(message)) == plain(sent(message))


@given(answers(), answers(), st.sampled_from(ECHOES))
def test_any_echo_of_two_turns_is_the_history_that_was_sampled(
    one: Message, two: Message, echo: Callable[[Items], Items]
) -> None:
    first, second = sent(one), sent(two)
    history: list[Message] = [{"role": "user", "content": "Hi"}, one]
    history += [{"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in one.get("tool_calls", ())]
    history += [{"role": "user", "content": "On"}, two]
    echoed = [{"role": "user", "content": "Hi"}, *echo(first), *results(first)]
    echoed += [{"role": "user", "content": "On"}, *echo(second)]
    messages = chat_messages(echoed, None)
    if not (one["content"].strip() or one.get("tool_calls")) or not (two["content"].strip() or two.get("tool_calls")):
        return  # an empty turn may vanish: a break, not a mismatch
    assert chain_all(messages)[-1] == chain_all(history)[-1]


@given(answers())
def test_results_between_the_calls_of_one_turn_leave_it_one_turn(message: Message) -> None:
    items = sent(message)
    messages = chat_messages([{"role": "user", "content": "Hi"}, *_results_between(items)], None)
    assert [one["role"] for one in messages[1:]] == ["assistant", *["tool"] * len(message.get("tool_calls", ()))]
    assert chain_all(messages[:2])[-1] == chain_all([messages[0], message])[-1]


@given(answers(), st.data())
def test_a_change_of_what_an_item_says_is_another_history(message: Message, data: st.DataObject) -> None:
    items = [item for item in sent(message) if item["type"] != "reasoning"]
    assume(items)  # an answer of reasoning alone says nothing that could be changed
    changed = copy.deepcopy(items)
    item = data.draw(st.sampled_from(changed))
    if item["type"] == "message":
        item["content"][0]["text"] = "x" + item["content"][0]["text"].strip() + "y"
    else:
        field = data.draw(st.sampled_from(["call_id", "name", "namespace", "said"]))
        if field == "said":
            field = "input" if "input" in item else "arguments"
            item[field] = '{"another": "one"}x' + item[field]
        else:
            item[field] = (item.get(field) or "") + "other"
    start = [{"role": "user", "content": "Hi"}]
    assert chain_all(chat_messages(start + items, None))[-1] != chain_all(chat_messages(start + changed, None))[-1]


def test_a_user_between_two_items_of_one_turn_parts_them() -> None:
    made = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    said, call = sent({"role": "assistant", "content": "Hm.", "tool_calls": [made]})
    messages = chat_messages([{"role": "user", "content": "Hi"}, said, {"role": "user", "content": "Wait"}, call], None)
    assert [one["role"] for one in messages] == ["user", "assistant", "user", "assistant"]


def test_two_answers_in_a_row_stay_two() -> None:
    one, two = sent({"role": "assistant", "content": "A"})[0], sent({"role": "assistant", "content": "B"})[0]
    for items in ([one, two], _drop("id")([one, two])):
        texts = [message["content"] for message in chat_messages(items, None)]
        assert texts == ["A", "B"]


def test_instructions_and_leading_developer_messages_are_one_system_message_and_later_ones_stand() -> None:
    items = [{"role": role, "content": role} for role in ("developer", "system", "user", "developer")]
    messages = chat_messages(items, "Be brief.")
    assert [one["role"] for one in messages] == ["system", "user", "system"]
    assert messages[0]["content"] == "Be brief.\n\ndeveloper\n\nsystem"


def test_the_reasoning_token_is_given_where_it_is_included_and_nothing_is_ever_stored() -> None:
    answer = Answer({"role": "assistant", "content": "A", "reasoning": "Hm."}, "stop", Usage(1, 1))
    for include, given_token in (([], False), (["reasoning.encrypted_content"], True)):
        ask = parse(orjson.dumps({"input": "Hi", "include": include, "store": False}), training=True)
        response = Responses().completion(uuid7(1), "m", 0, ask, answer)
        assert bool(response["output"][0].get("encrypted_content")) == given_token
        assert response["store"] is False
        assert ask.notes == ()


@given(words)
def test_a_reasoning_token_is_stable_and_holds_the_reasoning(text: str) -> None:
    assert reasoning_token(text) == reasoning_token(text)
    assert reasoning_of(reasoning_token(text)) == text


@pytest.mark.parametrize("token", [None, "", "gAAAA", "tg1.", "tg1.%%%", "tg1.AAAA", 5])
def test_any_other_token_is_no_reasoning(token: Any) -> None:
    assert reasoning_of(token) == ""
