"""What a client gets: sound JSON, whole tool calls, usage where and only where it was asked for."""

from __future__ import annotations

import json

import pytest

from tests.conformance.answers import NULL, chat
from tests.conformance.targets import NotOffered, Target
from tests.conformance.wanted import BRACES, HI, NESTED, TOOLS, Says, calling, then

STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
CITY = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


@STREAMED
def test_logprobs_true_top_logprobs_null(target: Target, says: Says, stream: bool) -> None:
    says(["Hello."])
    answer = chat(target.session(), HI, stream=stream, logprobs=True, top_logprobs=NULL)
    assert answer.choice.content == "Hello."


@STREAMED
def test_minus_infinity_in_json(target: Target, says: Says, stream: bool) -> None:
    says(["Hello there, all of you."])
    session = target.session(free=True)
    answer = chat(session, HI, stream=stream, logprobs=True, top_logprobs=20)  # strictly parsed, as everywhere here
    assert answer.choice.content == "Hello there, all of you."


@STREAMED
def test_tool_parser_loses_a_brace(target: Target, says: Says, stream: bool) -> None:
    says([calling(NESTED)])
    answer = chat(target.session(), HI, stream=stream, tools=TOOLS)
    (call,) = answer.choice.calls.values()
    assert json.loads(call.arguments) == NESTED, f"the arguments are {call.arguments!r}"
    assert not answer.choice.content.strip(), f"the content is {answer.choice.content!r}"


@STREAMED
def test_tool_parser_fails_on_braces_in_arguments(target: Target, says: Says, stream: bool) -> None:
    says([calling(BRACES, {"cmd": "}"})])
    answer = chat(target.session(), HI, stream=stream, tools=TOOLS)
    got = [json.loads(call.arguments) for call in answer.choice.calls.values()]
    assert got == [BRACES, {"cmd": "}"}], f"the arguments are {got}"


@STREAMED
def test_tool_choice_required_duplicates_streamed_text(target: Target, says: Says, stream: bool) -> None:
    says({"": [{"tool_calls": [{"name": "weather", "arguments": '{"city": "Rome"}'}]}]})
    answer = chat(target.session(free=True), HI, stream=stream, tools=CITY, tool_choice="required", temperature=0)
    assert answer.choice.calls, "there is no call"
    for call in answer.choice.calls.values():
        assert call.name == "weather", f"the name is {call.name!r}"
        assert json.loads(call.arguments)["city"] in ("Paris", "Rome"), f"the arguments are {call.arguments!r}"
    assert "weather" not in answer.choice.content, f"the call is in the content too: {answer.choice.content!r}"


def test_n_greater_one_corrupts_streamed_tool_calls(target: Target, says: Says) -> None:
    says([calling(NESTED)])
    answer = chat(target.session(free=True), HI, stream=True, tools=TOOLS, n=2)
    if answer.status == 400 and "n=1" in json.loads(answer.text)["error"]["message"]:
        raise NotOffered("n > 1 is refused with a 400 that says so")
    assert answer.status == 200, f"HTTP {answer.status}"
    for choice in answer.choices.values():
        (call,) = choice.calls.values()
        assert (call.name, json.loads(call.arguments)) == ("bash", NESTED), f"the arguments are {call.arguments!r}"
    if len(answer.choices) == 1:
        raise NotOffered("one choice is given, whatever n is")


def test_tool_call_id_missing_in_streams(target: Target, says: Says) -> None:
    says([calling({"cmd": "a"}, {"cmd": "b"}), calling({"cmd": "c"})])
    session = target.session()
    first = chat(session, HI, stream=True, tools=TOOLS)
    second = chat(session, [*HI, *then(first.message)], stream=True, tools=TOOLS)
    calls = [*first.choice.calls.values(), *second.choice.calls.values()]
    assert len(calls) == 3
    assert all(len(set(call.ids)) == 1 for call in calls), f"the ids are {[call.ids for call in calls]}"
    assert len({call.ids[0] for call in calls}) == 3, "two calls have the same id"


def test_usage_chunk_has_choices(target: Target, says: Says) -> None:
    says(["Hello there."])
    answer = chat(target.session(), HI, stream=True, stream_options={"include_usage": True})
    with_usage = [event for event in answer.events if event.get("usage")]
    assert with_usage, "there is no usage"
    assert with_usage[-1]["choices"] == [], "usage stands beside a choice"
    assert with_usage[-1] is answer.events[-1], "the usage is not last"
    assert answer.text.rstrip().endswith("data: [DONE]")


def test_explicit_include_usage_false_overridden(target: Target, says: Says) -> None:
    says(["Hello there."])
    answer = chat(target.session(), HI, stream=True, stream_options={"include_usage": False})
    assert answer.choice.content == "Hello there."
    assert answer.usage is None, "there is usage"


def test_huge_default_max_tokens(target: Target, says: Says) -> None:
    says(["Hello.", "Hello again."])
    session = target.session()
    messages = [*HI]
    for wanted in ("Hello.", "Hello again."):
        answer = chat(session, messages, max_tokens=None)
        assert answer.choice.content == wanted, f"HTTP {answer.status}"
        messages += then(answer.message)


def test_huge_max_tokens_of_an_agent(target: Target, says: Says) -> None:
    if target.name == "vllm":
        raise NotOffered("refuses with words what exceeds the context, as it documents")
    says(["Hello."])
    answer = chat(target.session(), HI, max_tokens=65_536)
    assert answer.choice.content == "Hello."
