"""Recorded bodies of every supported vLLM are understood; what is not the wire is a fault."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngate.proxy.engine.errors import EngineFault
from turngate.proxy.engine.types import LOGPROB_FLOOR, GenerateCall
from turngate.proxy.engine.whole_derender import WholeDerender, parse_whole
from turngate.proxy.engine.wire import (
    clean_delta,
    derender_request,
    finite,
    generate_body,
    parse_chunk,
    parse_derendered,
    parse_load,
    parse_max_loras,
    parse_rendered,
    quick_chunk,
    render_body,
)

WIRE = pathlib.Path(__file__).parents[2] / "fixtures" / "wire"
RECORDED = sorted(path for path in WIRE.glob("*/*") if path.is_dir())


def exchange(folder: pathlib.Path, name: str) -> dict[str, Any]:
    """One recorded exchange."""
    value: dict[str, Any] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    return value


@pytest.fixture(params=RECORDED, ids=lambda path: f"{path.parent.name}-{path.name}")
def recorded(request: pytest.FixtureRequest) -> pathlib.Path:
    """A folder of recorded exchanges."""
    folder: pathlib.Path = request.param
    return folder


def test_rendered_prompts_keep_their_ids_and_parameters(recorded: pathlib.Path) -> None:
    answer = exchange(recorded, "render")["response"]
    rendered = parse_rendered(answer)
    assert rendered.ids.dtype == np.int32
    assert rendered.ids.tolist() == answer["token_ids"]
    assert rendered.sampling_params == answer["sampling_params"]
    assert rendered.extra == {}


@pytest.mark.parametrize("name", ["generate_stream", "generate_stream_top"])
def test_streamed_tokens_have_one_log_prob_each_and_end_with_a_reason(recorded: pathlib.Path, name: str) -> None:
    top = 2 if name.endswith("top") else 0
    events = [event for event in exchange(recorded, name)["events"] if event != "[DONE]"]
    chunks = [chunk for chunk in (parse_chunk(event, top) for event in events) if chunk is not None]
    assert sum(len(chunk.ids) for chunk in chunks) == 4
    assert all(len(chunk.ids) == len(chunk.logprobs) for chunk in chunks)
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    for chunk in chunks:
        assert (chunk.top is None) == (top == 0)
        for pairs in chunk.top or ():
            assert len(pairs) == top
            assert pairs[0][1] >= pairs[1][1]


def test_a_whole_answer_is_one_chunk(recorded: pathlib.Path) -> None:
    answer = exchange(recorded, "generate")["response"]
    chunk = parse_chunk(answer, 0)
    assert chunk is not None
    assert list(chunk.ids) == answer["choices"][0]["token_ids"]


STREAMING = [folder for folder in RECORDED if (folder / "derender_0.json").exists()]
WHOLE = [folder for folder in RECORDED if (folder / "derender_whole.json").exists()]


@pytest.mark.parametrize("recorded", WHOLE, ids=lambda path: f"{path.parent.name}-{path.name}")
async def test_a_whole_answer_derendered_is_the_message_of_what_was_fed(recorded: pathlib.Path) -> None:
    asked = exchange(recorded, "derender_whole")["request"]["generate_response"]["choices"][0]["token_ids"]

    async def whole(ids: Sequence[int], parsed: bool) -> Mapping[str, Any]:
        assert list(ids) == asked
        return parse_whole(exchange(recorded, "derender_whole" if parsed else "derender_whole_plain")["response"])

    derender = WholeDerender(whole, frozenset(asked[-1:]))
    early, state = await derender(asked, None, None)
    assert early == {}, "a marker among the ids keeps everything back"
    delta, _ = await derender((), "stop", state)
    (call,) = delta["tool_calls"]
    assert delta["content"].strip() == "Now."
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("bash", {"command": "ls  é"})


@pytest.mark.parametrize("recorded", STREAMING, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_derendered_deltas_add_up_to_the_text_that_was_fed(recorded: pathlib.Path) -> None:
    content, arguments, names = "", "", []
    for number in range(4):
        delta, state = parse_derendered(exchange(recorded, f"derender_{number}")["response"])
        assert state["role_sent"]
        assert None not in delta.values()
        content += delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            arguments += call["function"].get("arguments", "")
            names += [call["function"]["name"]] if "name" in call["function"] else []
    if recorded.name == "hermes":
        assert (content, names, arguments) == ("Now.\n", ["bash"], '{"command": "ls  é"}')
    else:
        assert (names, arguments) == ([], "")
        assert content.startswith("Now.\n<tool_call>")


def test_a_usage_event_is_no_chunk() -> None:
    assert parse_chunk({"choices": [], "usage": {"prompt_tokens": 1}}, 0) is None


@pytest.mark.parametrize(
    "event",
    [
        {},
        {"choices": [{"index": 0}]},
        {"choices": [{"token_ids": [1, 2], "logprobs": None}]},
        {"choices": [{"token_ids": [1], "logprobs": {"content": [{"token_id": 2, "logprob": -1.0}]}}]},
    ],
)
def test_ids_without_their_own_log_probs_are_a_fault(event: dict[str, Any]) -> None:
    with pytest.raises(EngineFault):
        parse_chunk(event, 0)


@pytest.mark.parametrize("value", [None, "text", {"token_ids": [1]}, {"token_ids": None, "sampling_params": {}}])
def test_a_render_answer_without_ids_is_a_fault(value: Any) -> None:
    with pytest.raises(EngineFault, match="token_ids"):
        parse_rendered(value)


@given(st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True)))
def test_every_log_prob_is_safe_to_store(value: float | None) -> None:
    assert finite(value) >= LOGPROB_FLOOR
    if value is not None and LOGPROB_FLOOR <= value < math.inf:
        assert finite(value) == value


def test_render_does_not_see_what_concerns_only_the_answers_form() -> None:
    body = {"model": "m", "messages": [], "stream": True, "stream_options": {}, "n": 2, "top_logprobs": 3, "seed": None}
    assert render_body(body, 100) == {"model": "m", "messages": []}


@pytest.mark.parametrize(("asked", "kept"), [(100, True), (101, False)])
def test_a_token_limit_beyond_the_context_is_left_to_render(asked: int, kept: bool) -> None:
    assert ("max_tokens" in render_body({"max_tokens": asked}, 100)) == kept


@pytest.mark.parametrize(("wanted", "asked"), [(0, 0), (1, 2), (5, 6), (20, 20)])
def test_one_alternative_more_is_asked_for_since_the_sampled_token_takes_a_place(wanted: int, asked: int) -> None:
    call = GenerateCall("m", np.array([1], np.int32), {"temperature": 0.5}, {"reasoning_ended": True}, "r", wanted)
    body = generate_body(call, stream=True)
    assert body["sampling_params"] == {"temperature": 0.5, "logprobs": asked}
    assert body["reasoning_ended"] is True


def test_derender_never_gets_the_messages() -> None:
    body = {"messages": [{"role": "user", "content": "long"}], "tools": [{}], "tool_choice": None, "temperature": 1}
    assert derender_request(body) == {"messages": [], "tools": [{}]}


def test_entries_of_one_tool_call_in_one_delta_become_one() -> None:
    entries = [
        {"id": "a", "type": "function", "index": 0, "function": {"name": "f", "arguments": None}},
        {"id": None, "type": None, "index": 0, "function": {"name": None, "arguments": '{"x"'}},
        {"id": None, "type": None, "index": 0, "function": {"name": None, "arguments": ": 1}"}},
        {"id": "b", "type": "function", "index": 1, "function": {"name": "g", "arguments": ""}},
    ]
    delta = clean_delta({"role": "assistant", "content": None, "reasoning": None, "tool_calls": entries})
    assert delta == {
        "tool_calls": [
            {"index": 0, "id": "a", "function": {"name": "f", "arguments": '{"x": 1}'}},
            {"index": 1, "id": "b", "function": {"name": "g"}},
        ]
    }


def test_load_is_summed_over_engine_cores() -> None:
    metrics = "\n".join(
        [
            "# TYPE vllm:num_requests_running gauge",
            'vllm:num_requests_running{engine="0",model_name="m"} 3.0',
            'vllm:num_requests_running{engine="1",model_name="m"} 4.0',
            'vllm:num_requests_waiting{engine="0",model_name="m"} 2.0',
            'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0',
            'vllm:kv_cache_usage_perc{engine="0"} 0.25',
            'vllm:kv_cache_usage_perc{engine="1"} 0.5',
            'vllm:lora_requests_info{max_lora="4",running_lora_adapters=""} 1.7e+09',
        ]
    )
    load = parse_load(metrics)
    assert (load.running, load.waiting, load.kv_usage) == (7, 2, 0.5)
    assert parse_max_loras(metrics) == 4
    assert parse_max_loras("") is None


def event_of(entries: list[tuple[int, float]], finish: str | None, stop: int | str | None) -> dict[str, Any]:
    """An event of generate's stream, as vLLM writes it."""
    content = [{"token_id": i, "logprob": p, "rank": 1, "top_logprobs": [{"token_id": i}]} for i, p in entries]
    choice = {"index": 0, "finish_reason": finish, "stop_reason": stop, "token_ids": [i for i, _ in entries]}
    return {"request_id": "x", "usage": None, "choices": [{**choice, "logprobs": {"content": content}}]}


@given(
    st.lists(st.tuples(st.integers(0, 2**31), st.floats(-1e5, 0)), max_size=5),
    st.sampled_from([(None, None), ("stop", None), ("stop", 7), ("stop", "</s>"), ("length", None)]),
)
def test_the_quick_reading_of_an_event_is_the_careful_one(entries: Any, reasons: Any) -> None:
    event = event_of(entries, *reasons)
    assert quick_chunk(json.dumps(event).encode()) == parse_chunk(event, 0)


def test_what_is_unusual_is_left_to_the_careful_reading() -> None:
    usual = event_of([(1, -0.5)], None, None)
    choice = usual["choices"][0]
    odd = [
        {**usual, "choices": []},
        {"error": {"message": "died"}},
        {**usual, "error": {"message": "died"}},
        {**usual, "choices": [{**choice, "token_ids": [2]}]},
        {**usual, "choices": [{**choice, "token_ids": None}]},
        {**usual, "choices": [{**choice, "logprobs": None}]},
        {**usual, "choices": [{**choice, "logprobs": {"content": [{"token": "token_id:1", "logprob": -1.0}]}}]},
        {**usual, "choices": [{**choice, "logprobs": {"content": [{"token_id": 1, "logprob": math.nan}]}}]},
    ]
    assert [quick_chunk(json.dumps(event).encode()) for event in odd] == [None] * len(odd)
    assert quick_chunk(b"not json") is None
