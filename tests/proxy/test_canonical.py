"""Canonical digests: the same for every echo of a turn, different for every change of meaning."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.proxy.echoes import HARNESSES, javascript
from turngate.proxy.canonical import (
    START,
    canonical_arguments,
    chain,
    chain_all,
    message_digest,
    reasoning_kinds,
    same_json,
    tools_digest,
)

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["\u2028", "1", "true", "null", "é\u0301", "\\u2028", " "])
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)
objects = st.dictionaries(st.text(max_size=5), values, max_size=4)
texts = st.text(max_size=20) | st.sampled_from(["", " \n", "fine.\n", "\u00a0x\ufeff", "<tool_call>"])
names = st.sampled_from(["bash", "read", "edit"])


@st.composite
def written(draw: st.DrawFn) -> str:
    """Arguments as a model may write them: odd spacing, escapes and number forms."""
    value = draw(objects)
    text = json.dumps(value, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 0, 2])))
    odd = draw(st.sampled_from(['"n":1e3', '"n":1.50', '"n":-0', '"n":0.1e1', '"n":9007199254740993', '"n":1E400', ""]))
    return text if not odd else "{" + odd + ("," if value else "") + text[1:]


@st.composite
def answers(draw: st.DrawFn) -> dict[str, Any]:
    """Assistant messages as the gateway hands them out."""
    calls = [
        {
            "id": f"call_{n}-{draw(st.integers(0, 9))}",
            "type": "function",
            "function": {"name": draw(names), "arguments": draw(written())},
        }
        for n in range(draw(st.integers(0, 3)))
    ]
    message: dict[str, Any] = {"role": "assistant", "content": draw(texts), "reasoning": draw(texts)}
    return {**message, "tool_calls": calls} if calls else message


@given(answers(), st.sampled_from(HARNESSES))
def test_what_a_harness_echoes_is_the_same_message(message: dict[str, Any], harness: Any) -> None:
    assert message_digest(harness(message)) == message_digest(message)


@given(answers(), st.sampled_from(HARNESSES), st.sampled_from(HARNESSES))
def test_an_echo_of_an_echo_is_the_same_message(message: dict[str, Any], one: Any, two: Any) -> None:
    first = json.loads(json.dumps(one(message)))
    assume(isinstance(first.get("content"), str))
    assume(all(isinstance(call["function"]["arguments"], str) for call in first.get("tool_calls", ())))
    assert message_digest(two(first)) == message_digest(message)


@given(objects, objects)
def test_arguments_match_only_when_javascript_could_not_tell_them_apart(one: Any, two: Any) -> None:
    same = _sorted(javascript(json.dumps(one))) == _sorted(javascript(json.dumps(two)))
    assert (canonical_arguments(json.dumps(one)) == canonical_arguments(json.dumps(two))) == same


def _sorted(text: str) -> str:
    return json.dumps(json.loads(text, parse_int=float), sort_keys=True)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ('{"a": 1e3}', '{"a":1000}'),
        ('{"a": 1.50}', '{"a":1.5}'),
        ('{"a": 12345678901234567890}', '{"a":12345678901234567000}'),
        ('{"a": 1, "b": 2, "a": 3}', '{"a":3,"b":2}'),
        ('{"a": "\\u2028"}', '{"a":"\u2028"}'),
        ('{"a": "\\u00e9\\/"}', '{"a":"é/"}'),
        ('{"a": "one\ntwo"}', '{"a":"one\\ntwo"}'),
        ('{"a": 1e999}', '{"a":null}'),
        ('{"a": -0.0}', '{"a":0}'),
        ("", "{}"),
        ("{not json", "{not json"),
    ],
)
def test_arguments_written_differently_mean_the_same(one: str, two: str) -> None:
    assert canonical_arguments(one) == canonical_arguments(two)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ('{"a": "1"}', '{"a": 1}'),
        ('{"a": true}', '{"a": 1}'),
        ('{"a": "true"}', '{"a": true}'),
        ('{"a": null}', "{}"),
        ('{"a": [1, 2]}', '{"a": [2, 1]}'),
        ('{"a": 1}', '{"A": 1}'),
        ('{"a": " x"}', '{"a": "x"}'),
        ("{not json", "{not json "),
        ("{not json", '"{not json"'),
        ('{"a": 0.1}', '{"a": 0.10000000000000002}'),
    ],
)
def test_arguments_of_another_meaning_differ(one: str, two: str) -> None:
    assert canonical_arguments(one) != canonical_arguments(two)


@given(st.text(max_size=30), st.text(max_size=30))
def test_broken_arguments_compare_verbatim(one: str, two: str) -> None:
    assume(one != two)
    broken = ["{" + one, "{" + two]
    assume(all(canonical_arguments(text).startswith("v") for text in broken))
    assert canonical_arguments(broken[0]) != canonical_arguments(broken[1])


@pytest.mark.parametrize("arguments", ["[" * 100_000, "9" * 10_000, "\ud800", '{"a": "\ud800"}', '{"a": NaN}'])
def test_no_arguments_are_too_odd_to_compare(arguments: str) -> None:
    message = {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": arguments}}]}
    assert message_digest(message) == message_digest(dict(message))


@given(answers(), st.data())
def test_a_change_of_meaning_is_another_message(message: dict[str, Any], data: st.DataObject) -> None:
    calls = [dict(call) for call in message.get("tool_calls", ())]
    changes: list[dict[str, Any]] = [
        {**message, "role": "user"},
        {**message, "content": (message["content"] or "") + "x"},
        {**message, "tool_calls": [*calls, {"id": "new", "function": {"name": "bash", "arguments": "{}"}}]},
    ]
    if calls:
        first, function = calls[0], calls[0]["function"]
        changes += [
            {**message, "tool_calls": calls[1:]},
            {**message, "tool_calls": [{**first, "id": "other"}, *calls[1:]]},
            {**message, "tool_calls": [{**first, "function": {**function, "name": "invalid"}}, *calls[1:]]},
            {**message, "tool_calls": [{**first, "function": {**function, "arguments": '{"zz":"!"}'}}, *calls[1:]]},
        ]
    if len(calls) > 1:
        changes.append({**message, "tool_calls": calls[::-1]})
    assert message_digest(data.draw(st.sampled_from(changes))) != message_digest(message)


def test_a_tool_result_belongs_to_its_call() -> None:
    result = {"role": "tool", "tool_call_id": "call_1", "content": "ok"}
    assert message_digest(result) == message_digest({**result, "tool_call_id": "call1", "name": "bash"})
    assert message_digest(result) != message_digest({**result, "tool_call_id": "call_2"})
    assert message_digest(result) != message_digest({**result, "content": "no"})


def test_parts_that_are_no_text_count() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:a"}}
    text = {"type": "text", "text": "see"}
    both = {"role": "user", "content": [text, image]}
    assert message_digest(both) == message_digest({"role": "user", "content": [text, {**image, "cache_control": {}}]})
    others = [[image, text], [text], [text, {**image, "image_url": {"url": "data:b"}}]]
    assert all(message_digest(both) != message_digest({"role": "user", "content": parts}) for parts in others)


@given(st.lists(answers(), max_size=4))
def test_a_chain_has_one_digest_for_each_head(messages: list[dict[str, Any]]) -> None:
    heads = chain_all(messages)
    assert heads[0] == START
    assert heads[1:] == [chain(before, message) for before, message in zip(heads, messages, strict=False)]
    assert len(set(heads)) == len(heads)


def test_tools_are_an_ordered_list_of_unordered_objects() -> None:
    one: dict[str, Any] = {"type": "function", "function": {"name": "a", "parameters": {"x": 1, "y": None}}}
    two: dict[str, Any] = {"function": {"parameters": {"x": 1.0}, "name": "a"}, "type": "function", "cache_control": {}}
    assert tools_digest([one]) == tools_digest([two])
    assert tools_digest(None) == tools_digest([])
    assert tools_digest([one, {**two, "type": "b"}]) != tools_digest([{**two, "type": "b"}, one])


def test_reasoning_is_seen_in_its_field_and_in_the_text() -> None:
    assert reasoning_kinds({"role": "assistant", "content": "a", "reasoning": ""}) == frozenset()
    assert reasoning_kinds({"role": "assistant", "content": "a", "reasoning_content": "r"}) == {"field"}
    assert reasoning_kinds({"role": "assistant", "content": "r</think>a"}) == {"inline"}


def test_json_values_are_the_same_only_with_the_same_types() -> None:
    one = {"a": "x", "b": [1, {"c": None}]}
    assert same_json(one, {"b": [1, {"c": None}], "a": "x"})
    for other in ({"a": "x", "b": [True, {"c": None}]}, {"a": "x", "b": [1.0, {"c": None}]}, {"a": "x"}, [], "x", None):
        assert not same_json(one, other)
    assert not same_json(0, False)
    assert not same_json([0.0], [0])
