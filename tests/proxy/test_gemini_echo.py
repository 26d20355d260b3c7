"""Gemini's echo of an answer means what was recorded, however it is written; any change of meaning does not."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.proxy.echoes import javascript
from tests.proxy.test_canonical import answers, names, objects, written
from turngate.proxy.ask import Answer, Ask, Usage
from turngate.proxy.call_names import with_named_calls
from turngate.proxy.canonical import message_digest
from turngate.proxy.dialects import gemini_ask
from turngate.proxy.dialects.gemini import Gemini
from turngate.proxy.dialects.gemini_values import chat_arguments, result_text, wire_arguments
from turngate.proxy.errors import BadRequest

BROKEN = st.sampled_from(['{"a": ', "[1, 2]", '"text"', '{"a": NaN}', '{"raw": "x{"}', '{"raw": "{}"}', "7"])
USER = {"role": "user", "parts": [{"text": "Go."}]}


def parsed(contents: list[Any], **more: Any) -> Ask:
    return gemini_ask.parse(json.dumps({"contents": contents, **more}).encode(), "m", training=True)


@st.composite
def sampled(draw: st.DrawFn) -> dict[str, Any]:
    """Answers as the engine gives them: arguments that are no JSON among them."""
    message = draw(answers())
    for call in message.get("tool_calls", ()):
        if draw(st.integers(0, 3)) == 0:
            call["function"]["arguments"] = draw(BROKEN | st.text(max_size=6).map(lambda text: '{"raw": "' + text))
    return message


def answered(message: dict[str, Any], *, shown: bool = True) -> tuple[Any, list[dict[str, Any]]]:
    """The recorded message, and the parts that a client gets of it."""
    ask = parsed([USER], generationConfig={"thinkingConfig": {"includeThoughts": shown}})
    recorded = with_named_calls(message, ask.calls_before or {})
    body = Gemini().completion("turn", "m", 0, ask, Answer(recorded, "stop", Usage(1, 1)))
    return recorded, json.loads(orjson.dumps(body))["candidates"][0]["content"]["parts"]


@st.composite
def rewritten(draw: st.DrawFn, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The model contents of an echo: parts spread over contents, texts cut in pieces, ids and signatures lost."""
    contents: list[dict[str, Any]] = [{"role": "model", "parts": []}]
    for part in parts:
        kept = {key: value for key, value in part.items() if key != "thoughtSignature" or draw(st.booleans())}
        if kept.get("thought") and draw(st.booleans()):
            continue
        pieces = [kept]
        if "text" in kept and not kept.get("thought"):
            at = draw(st.integers(0, len(kept["text"])))
            pieces = [{"text": kept["text"][:at]}, {"text": kept["text"][at:]}]
        if "functionCall" in kept:
            call = dict(kept["functionCall"])
            call["id"] = draw(st.sampled_from([call["id"], "another", None]))
            call["args"] = orjson.loads(javascript(json.dumps(call["args"])))
            call["args"] = dict(sorted(call["args"].items(), reverse=draw(st.booleans())))
            pieces = [{draw(st.sampled_from(["functionCall", "function_call"])): call}]
        for piece in pieces:
            if draw(st.booleans()):
                contents.append({"role": "model", "parts": []})
            contents[-1]["parts"].append(piece)
    return contents


@settings(max_examples=50)
@given(sampled(), st.data())
def test_whatever_a_client_makes_of_an_answer_its_echo_is_the_recorded_message(
    message: dict[str, Any], data: st.DataObject
) -> None:
    recorded, parts = answered(message, shown=data.draw(st.booleans()))
    echo = parsed([USER, *data.draw(rewritten(parts)), USER]).messages
    assert [one["role"] for one in echo] == ["user", "assistant", "user"]
    assert message_digest(echo[1]) == message_digest(recorded)


@settings(max_examples=50)
@given(sampled(), objects, st.data())
def test_a_change_of_an_echo_is_another_message(
    message: dict[str, Any], args: dict[str, Any], data: st.DataObject
) -> None:
    recorded, parts = answered(message)
    calls = [i for i, part in enumerate(parts) if "functionCall" in part]
    more = {"functionCall": {"name": "bash", "args": args}}
    changes: list[list[Any]] = [[*parts, {"text": "x"}], [*parts, more], [{"text": "y"}, *parts]]
    if calls:
        i = data.draw(st.sampled_from(calls))
        call = parts[i]["functionCall"]
        changes += [
            parts[:i] + parts[i + 1 :],
            [*parts[:i], {"functionCall": {**call, "name": "other"}}, *parts[i + 1 :]],
            [*parts[:i], {"functionCall": {**call, "args": {**call["args"], "zz!": "!"}}}, *parts[i + 1 :]],
        ]
    echo = parsed([USER, {"role": "model", "parts": data.draw(st.sampled_from(changes))}]).messages
    assert message_digest(echo[1]) != message_digest(recorded)


@given(written() | BROKEN | st.text(max_size=12))
def test_arguments_come_back_with_the_meaning_they_were_sampled_with(text: str) -> None:
    line = orjson.dumps(wire_arguments(text))
    assert len(line.splitlines()) == 1  # an event's data is one line
    sent = orjson.loads(line)
    assert isinstance(sent, dict)
    one = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": text}}]}
    two = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": chat_arguments(sent)}}]}
    assert message_digest(one) == message_digest(two)


@given(objects)
def test_a_result_is_the_same_text_however_its_object_is_written(response: dict[str, Any]) -> None:
    again = dict(reversed(json.loads(javascript(json.dumps(response))).items()))
    if all(abs(number) < 2**53 for number in _numbers(response)):
        assert result_text(again) == result_text(response)
    assert result_text({"output": "plain"}) == result_text({"result": "plain"}) == "plain"
    assert result_text({"error": "no"}) == '{"error": "no"}'


def _numbers(value: Any) -> list[float]:
    if isinstance(value, dict | list):
        return [one for inner in (value.values() if isinstance(value, dict) else value) for one in _numbers(inner)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []


def call(name: str, call_id: str | None = None, **args: Any) -> dict[str, Any]:
    return {"functionCall": {"name": name, "args": args, **({"id": call_id} if call_id else {})}}


def response(name: str, text: str, call_id: str | None = None) -> dict[str, Any]:
    return {"functionResponse": {"name": name, "response": {"output": text}, **({"id": call_id} if call_id else {})}}


def answers_of(contents: list[Any]) -> dict[str, str]:
    """Text of each result -> arguments of the call that it answers."""
    messages = parsed(contents).messages
    calls = {one["id"]: one["function"]["arguments"] for m in messages for one in m.get("tool_calls", ())}
    return {m["content"]: calls[m["tool_call_id"]] for m in messages if m["role"] == "tool"}


def test_responses_without_ids_answer_calls_of_their_name_in_order() -> None:
    model = {"role": "model", "parts": [call("read", path="a"), call("bash", c="x"), call("read", path="b")]}
    user = {"role": "user", "parts": [response("read", "A"), response("read", "B"), response("bash", "X")]}
    assert answers_of([USER, model, user]) == {"A": '{"path":"a"}', "B": '{"path":"b"}', "X": '{"c":"x"}'}


def test_responses_with_ids_may_come_in_any_order_and_over_several_contents() -> None:
    model = {"role": "model", "parts": [call("read", "r1", path="a"), call("read", "r2", path="b")]}
    late = [{"role": "function", "parts": [response("read", "B", "r2")]}, {"parts": [response("read", "A", "r1")]}]
    assert answers_of([USER, model, *late]) == {"A": '{"path":"a"}', "B": '{"path":"b"}'}


def test_the_same_call_made_again_has_another_name() -> None:
    model = {"role": "model", "parts": [call("read", path="a"), call("read", path="a")]}
    user = {"role": "user", "parts": [response("read", "A"), response("read", "B")]}
    ids = [one["id"] for m in parsed([USER, model, user, model]).messages for one in m.get("tool_calls", ())]
    assert len(set(ids)) == 4
    assert all(one.isalnum() for one in ids)


@pytest.mark.parametrize(
    ("text", "sent"),
    [
        ('{ "b":1.50 ,"a":1e3}', '{ "b":1.50 ,"a":1e3}'),
        ("", "{}"),
        ('{\r\n"a"\n: "b\\n"}', '{  "a" : "b\\n"}'),
        ('{"a": 1e999}', '{"a":null}'),
        ('{"a": ', '{"raw":"{\\"a\\": "}'),
        ("[1]", '{"raw":"[1]"}'),
        ('{"raw": "[1]"}', '{"raw":"{\\"raw\\": \\"[1]\\"}"}'),
        ('{"raw": "{}"}', '{"raw": "{}"}'),
    ],
)
def test_arguments_go_out_verbatim_or_wrapped(text: str, sent: str) -> None:
    assert orjson.dumps(wire_arguments(text)).decode() == sent


@given(names, objects)
def test_a_name_depends_on_what_is_said_alone(name: str, args: dict[str, Any]) -> None:
    model = {"role": "model", "parts": [{"functionCall": {"name": name, "args": args, "id": "x"}}]}
    again = {"role": "model", "parts": [{"function_call": {"name": name, "args": dict(reversed(args.items()))}}]}
    assert (
        parsed([USER, model]).messages[1]["tool_calls"][0]["id"]
        == (parsed([USER, again]).messages[1]["tool_calls"][0]["id"])
    )


_WORDS = (
    "contents role parts text functionCall function_response name args response id tools functionDeclarations type "
    "parameters generationConfig topK stopSequences thought toolConfig functionCallingConfig mode responseSchema "
    "allowedFunctionNames systemInstruction"
)
_KEYS = st.sampled_from(_WORDS.split())
_LEAVES = st.none() | st.booleans() | st.integers(-2, 9) | st.floats(allow_nan=False) | st.text(max_size=3)
_BODIES = st.recursive(
    _LEAVES | st.just("model") | st.just("user"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=300)
@given(_BODIES, st.dictionaries(_KEYS, _BODIES, max_size=4))
def test_any_body_is_an_ask_or_refused_in_words(contents: Any, body: dict[str, Any]) -> None:
    with suppress(BadRequest):
        gemini_ask.parse(json.dumps({"contents": contents, **body}).encode(), "m", training=True)
