"""Blocks to chat form and back, without a server: each way to write a turn again matches, other meanings do not."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from turngate.proxy.ask import Answer, Ask, Usage
from turngate.proxy.canonical import chain_all, message_digest
from turngate.proxy.dialects.messages import Messages, parse
from turngate.proxy.dialects.messages_json import UNPARSED, arguments_of, input_json
from turngate.proxy.errors import BadRequest

DIALECT = Messages()
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(TEXT, VALUES, max_size=4).filter(lambda value: set(value) != {UNPARSED})
ARGUMENTS = OBJECTS.map(json.dumps) | OBJECTS.map(lambda value: json.dumps(value, indent=1)[:-2]) | TEXT
CALLS = st.lists(st.tuples(st.sampled_from(["bash", "read"]), ARGUMENTS), max_size=3)


def ask(**body: Any) -> Ask:
    """A parsed request."""
    return parse(orjson.dumps({"messages": [{"role": "user", "content": "Hi"}], **body}), training=True)


def recorded(content: str, reasoning: str, calls: list[tuple[str, str]]) -> dict[str, Any]:
    """An answer as the gateway keeps it."""
    message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
    if reasoning:
        message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": f"call{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(calls)
        ]
    return message


def told(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The blocks that a client gets."""
    answer = Answer(message, "stop", Usage(1, 1))
    return list(json.loads(orjson.dumps(DIALECT.completion("t", "m", 0, ask(), answer)))["content"])


def streamed(message: dict[str, Any], sizes: list[int]) -> list[dict[str, Any]]:
    """The blocks that a client puts together from events, with the texts cut into pieces of these sizes."""
    events = DIALECT.events("t", "m", 0, ask())
    events.start(1)
    data = events.delta({"role": "assistant", "content": ""})
    for part in ("reasoning", "content"):
        for piece in cut(message.get(part) or "", sizes):
            data += events.delta({part: piece})
    for i, call in enumerate(message.get("tool_calls", ())):
        head = {"index": i, "id": call["id"], "type": "function"}
        data += events.delta({"tool_calls": [{**head, "function": {"name": call["function"]["name"]}}]})
        for piece in cut(call["function"]["arguments"], sizes):
            data += events.delta({"tool_calls": [{"index": i, "function": {"arguments": piece}}]})
    data += events.end(Answer(message, "stop", Usage(1, 1)))
    return blocks_of([json.loads(line[6:]) for line in data.decode().split("\n") if line.startswith("data: ")])


def blocks_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Blocks put together as a client does."""
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "partial": ""})
        elif event["type"] == "content_block_delta":
            (name, piece), block = next((k, v) for k, v in event["delta"].items() if k != "type"), blocks[-1]
            key = "partial" if name == "partial_json" else name
            block[key] = block.get(key, "") + piece
    for block in blocks:
        partial = block.pop("partial")
        if block["type"] == "tool_use":
            block["input"] = json.loads(partial)
    return blocks


def cut(text: str, sizes: list[int]) -> list[str]:
    """`text` in pieces."""
    pieces, at = [], 0
    while at < len(text):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(text[at : at + size])
        at += size
    return pieces


def echoed(blocks: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant message that an echo of these blocks becomes."""
    asked = ask(messages=[{"role": "assistant", "content": blocks}, {"role": "user", "content": "Go on"}])
    return dict(asked.messages[0])


@given(TEXT, TEXT, CALLS, st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_an_echo_matches_whole_or_streamed_in_any_order_of_keys_with_or_without_thoughts(
    content: str, reasoning: str, calls: list[tuple[str, str]], sizes: list[int]
) -> None:
    message = recorded(content, reasoning, calls)
    for blocks in (told(message), streamed(message, sizes)):
        assert message_digest(echoed(blocks)) == message_digest(message)
        rewritten = [
            {**block, "input": dict(sorted(block["input"].items(), reverse=True))} if "input" in block else block
            for block in blocks
            if block["type"] != "thinking" and (block["type"] != "text" or block["text"].strip())
        ]
        marked = [{**block, "cache_control": {"type": "ephemeral"}} for block in rewritten]
        assert message_digest(echoed(marked)) == message_digest(message)


@given(TEXT, CALLS, TEXT, CALLS)
def test_another_answer_does_not_match(
    content: str, calls: list[tuple[str, str]], other: str, others: list[tuple[str, str]]
) -> None:
    one, two = recorded(content, "", calls), recorded(other, "", others)
    assume(message_digest(one) != message_digest(two))
    assert message_digest(echoed(told(one))) != message_digest(two)


@given(ARGUMENTS)
def test_an_input_is_always_an_object_of_strict_json_and_comes_back_as_what_was_sampled(arguments: str) -> None:
    sent = orjson.loads(input_json(arguments))
    assert isinstance(sent, dict)
    back = arguments_of(sent)
    assert message_digest(recorded("", "", [("bash", back)])) == message_digest(recorded("", "", [("bash", arguments)]))


@pytest.mark.parametrize("text", ['{"a": NaN}', '{"a":1e999}', '{"a":"\\ud800"}', "[1]", "[" * 500, '{"a"', "\ufeff{}"])
def test_what_is_no_strict_object_travels_as_text(text: str) -> None:
    assert orjson.loads(input_json(text)) == {UNPARSED: text}
    assert arguments_of({UNPARSED: text}) == text


@given(TEXT, TEXT, CALLS, st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_a_thought_comes_back_with_its_signature_and_is_the_thought_that_was_sampled(
    content: str, reasoning: str, calls: list[tuple[str, str]], sizes: list[int]
) -> None:
    assume(reasoning)
    message = recorded(content, reasoning, calls)
    whole, pieces = told(message), streamed(message, sizes)
    assert whole[0] == pieces[0]
    assert whole[0]["signature"]
    assert echoed(whole)["reasoning"] == echoed(pieces)["reasoning"] == reasoning


def test_a_raw_line_break_within_a_string_is_escaped_for_clients() -> None:
    assert orjson.loads(input_json('{"a": "x\ny"}')) == {"a": "x\ny"}


def heads(body: dict[str, Any]) -> bytes:
    """The digest of a whole history."""
    return chain_all(ask(**body).messages)[-1]


CALL = {"type": "tool_use", "id": "a", "name": "bash", "input": {}}
OTHER = {**CALL, "id": "b"}


def history(*results: dict[str, Any], system: Any = "S") -> dict[str, Any]:
    """A conversation with two calls and what came back."""
    turn = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": [CALL, OTHER]}]
    return {"system": system, "messages": [*turn, {"role": "user", "content": list(results)}]}


def result(call: str, text: str, **more: Any) -> dict[str, Any]:
    """A tool result."""
    return {"type": "tool_result", "tool_use_id": call, "content": text, **more}


def test_results_match_in_any_order_as_text_or_blocks_and_beside_text() -> None:
    said = heads(history(result("a", "1"), result("b", "2")))
    marked = {"type": "text", "text": "1", "cache_control": {"type": "ephemeral"}}
    assert heads(history(result("b", "2", is_error=False), {**result("a", ""), "content": [marked]})) == said
    assert heads(history(result("a", "2"), result("b", "1"))) != said
    assert heads(history(result("a", "1", is_error=True), result("b", "2"))) != said
    text = {"type": "text", "text": "Note."}
    assert heads(history(text, result("b", "2"), result("a", "1"))) == heads(
        history(result("a", "1"), result("b", "2"), text)
    )


def test_the_billing_block_is_no_part_of_the_system_prompt_and_anything_else_is() -> None:
    def system(billing: str, words: str) -> list[dict[str, Any]]:
        return [{"type": "text", "text": f"x-anthropic-billing-header: {billing}"}, {"type": "text", "text": words}]

    body = history(result("a", "1"), system=system("cch=1", "S"))
    assert heads(body) == heads(history(result("a", "1"), system=system("cch=2", "S")))
    assert heads(body) == heads(history(result("a", "1")))
    assert heads(body) != heads(history(result("a", "1"), system=system("cch=1", "T")))
    assert ask(**body).notes == ("left_out:billing_block",)


def test_neighbours_of_one_role_are_one_message() -> None:
    apart = [{"role": "user", "content": "One"}, {"role": "user", "content": [{"type": "text", "text": "Two"}]}]
    assert ask(messages=apart).messages == [{"role": "user", "content": "One\nTwo"}]
    late = [*apart, {"role": "system", "content": "Now."}]
    assert [message["role"] for message in ask(messages=late, system="S").messages] == ["system", "user", "system"]


def test_choices_and_switches_become_chats_own() -> None:
    tools = [{"name": "bash", "input_schema": {"type": "object"}}]
    given_choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert ask(tools=tools, tool_choice=given_choice).render_body == {"parallel_tool_calls": False}
    assert ask(tools=tools, tool_choice={"type": "none"}).render_body == {"tool_choice": "none"}
    assert ask(tool_choice={"type": "none"}).render_body == {}
    free = parse(
        orjson.dumps({**history(result("a", "1")), "tools": tools, "tool_choice": {"type": "any"}}), training=False
    )
    assert free.render_body == {"tool_choice": "required"}
    assert ask(thinking={"type": "disabled"}).render_body["chat_template_kwargs"]["enable_thinking"] is False
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    assert ask(output_config={"format": schema}).render_body["response_format"]["type"] == "json_schema"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": []}, "at least one"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "user, assistant or system"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "object with type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}]}, "base64"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64"}}]}]}, "PDF"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"tools": [{"name": "x"}]}, "input_schema"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"thinking": {"type": "maybe"}}, "thinking"),
        ({"temperature": 3}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_a_wrong_field_is_named(body: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        ask(**body)
