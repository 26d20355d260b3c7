"""The messages dialect as the official anthropic SDK sees it, whole and streamed, on the token-exact core."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from tests.engines import RealEngine
from tests.fake_engine.settings import FakeSettings, Fault
from tests.gateway_process import GatewayProcess
from tests.proxy.anthropic_client import TOOLS, asking, results_of, say, session
from tests.proxy.conftest import Gate, StartFake, StartGateway
from tests.proxy.test_exact_rows import leased_rows
from tests.tap import Tap, rows_from
from turngate.proxy import wire
from turngate.proxy.store.reader import StoreReader
from turngate.proxy.turns import Turn
from turngate.proxy.verify import verify_store

WAYS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
ODD = [
    {
        "reasoning": "Hm.",
        "content": " Look. ",
        "tool_calls": [{"name": "bash", "arguments": '{"timeout":1e3,"command":"ls"}'}],
    },
    "Plain text, no call.  ",
    {"tool_calls": [{"name": "bash", "arguments": '{"a": "}"}'}, {"name": "bash", "arguments": '{ "c" : 1.50}'}]},
    {"tool_calls": [{"name": "bash", "arguments": '{"broken": '}]},
    {"content": "Listing.", "tool_calls": [{"name": "bash", "arguments": "[1]"}, {"name": "bash", "arguments": "{}"}]},
    {
        "tool_calls": [
            {"name": "bash", "arguments": '{"command": "a\\u2028b", "timeout": 123456789012345678901234567890}'}
        ]
    },
    "Done.",
]


def turns_of(gate: Gate, rollout: str) -> list[Turn]:
    """What was recorded of a rollout."""
    with StoreReader(gate.gateway.store) as reader:
        return reader.turns(rollout)


@WAYS
def test_an_answer_has_text_a_reason_and_the_usage_of_its_turn(gate: Gate, stream: bool) -> None:
    created, client = session(gate.says(["Hello there."]))
    message = say(client, stream=stream, **asking("Hi", system="Be brief."))
    assert [block.type for block in message.content] == ["text"]
    assert message.content[0].text == "Hello there."
    assert (message.stop_reason, message.stop_sequence, message.role, message.model) == (
        "end_turn",
        None,
        "assistant",
        "m",
    )
    (turn,) = turns_of(gate, created.id)
    assert message.usage.input_tokens == turn.prompt_tokens
    assert message.usage.output_tokens == len(turn.completion_ids)
    assert turn.request["messages"][0] == {"role": "system", "content": "Be brief."}


@WAYS
def test_thoughts_text_and_calls_become_blocks_in_order_and_inputs_are_objects(gate: Gate, stream: bool) -> None:
    _, client = session(gate.says(ODD[:1]))
    message = say(client, stream=stream, **asking("Go", tools=TOOLS))
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    thinking, _, call = message.content
    assert (thinking.thinking, bool(thinking.signature)) == ("Hm.", True)
    assert (call.name, call.input) == ("bash", {"timeout": 1000, "command": "ls"})
    assert message.stop_reason == "tool_use"


def test_events_come_in_the_apis_order_with_usage_first_and_last(gate: Gate) -> None:
    created, client = session(gate.says(ODD[:1]))
    events = list(client.messages.create(**asking("Go", tools=TOOLS), stream=True))
    kinds = [event.type for event in events]
    assert (kinds[0], kinds[-2], kinds[-1]) == ("message_start", "message_delta", "message_stop")
    blocks = [kind for kind in kinds if kind in ("content_block_start", "content_block_stop")]
    assert blocks == ["content_block_start", "content_block_stop"] * 3
    (turn,) = turns_of(gate, created.id)
    assert events[0].message.usage.input_tokens == turn.prompt_tokens
    assert events[-2].usage.output_tokens == len(turn.completion_ids)
    deltas = [event.delta.type for event in events if event.type == "content_block_delta"]
    assert list(dict.fromkeys(deltas)) == ["thinking_delta", "signature_delta", "text_delta", "input_json_delta"]


@pytest.mark.parametrize("history", ["append", "template"])
def test_a_conversation_of_odd_turns_is_one_row_exactly_as_it_crossed_the_wire(
    start_fake: StartFake, start_gateway: StartGateway, history: str
) -> None:
    script = ODD if history == "append" else [{**one, "reasoning": ""} if isinstance(one, dict) else one for one in ODD]
    with Tap(start_fake(script).url) as tap:
        gateway = start_gateway(tap.url)
        created, client = session(gateway, group="g", group_size=2, history=history)
        messages: list[Any] = [{"role": "user", "content": "Go"}]
        for number in range(len(script)):
            billing = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=1.{number};"}
            marked = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
            request: dict[str, Any] = {
                **asking(""),
                "messages": _cached(messages),
                "system": [billing, marked],
                "tools": TOOLS,
            }
            counted = client.messages.count_tokens(
                **{key: request[key] for key in ("model", "messages", "system", "tools")}
            )
            message = say(client, stream=number % 2 == 0, **request)
            assert counted.input_tokens == message.usage.input_tokens
            messages.append({"role": "assistant", "content": _echo(message)})
            following = results_of(message) or [{"type": "text", "text": "Go on."}]
            messages.append({"role": "user", "content": following})
        other, _ = session(gateway, group="g", group_size=2)
        witnessed = rows_from(tap.generations())
        handed = leased_rows(gateway, "g", [created, other])
    assert handed[created.id] == witnessed
    assert len(witnessed) == 1
    with StoreReader(gateway.store) as reader:
        turns = reader.turns(created.id)
    assert [turn.kind for turn in turns] == ["first", *["spliced"] * 6], [turn.break_cause for turn in turns]
    assert {"left_out:billing_block"} == set(turns[-1].flags)
    report = verify_store(gateway.store)
    assert (report.problems, report.exact_rows) == ([], report.rows)


def _echo(message: anthropic.types.Message) -> list[dict[str, Any]]:
    """The blocks as a client sends them back: schema keys first, no empty text."""
    blocks = [block.model_dump() for block in message.content]
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = dict(sorted(block["input"].items()))
    return [{key: value for key, value in block.items() if value is not None} for block in blocks]


def _cached(messages: list[Any]) -> list[Any]:
    """The messages with a cache mark on the last block, which moves from turn to turn."""
    *before, last = json.loads(json.dumps(messages))
    if isinstance(last["content"], str):
        last["content"] = [{"type": "text", "text": last["content"]}]
    last["content"][-1]["cache_control"] = {"type": "ephemeral"}
    return [*before, last]


@WAYS
def test_a_stop_sequence_a_cut_and_silence_have_their_reasons(gate: Gate, stream: bool) -> None:
    _, client = session(gate.says(["one STOP two"]))
    message = say(client, stream=stream, **asking("Hi", stop_sequences=["STOP"]))
    assert (message.stop_reason, message.stop_sequence, message.content[0].text) == ("stop_sequence", "STOP", "one ")
    message = say(client, stream=stream, **{**asking("Cut"), "max_tokens": 2})
    assert message.stop_reason == "max_tokens"
    _, client = session(gate.says([""]))
    message = say(client, stream=stream, **asking("Hi"))
    assert [(block.type, block.text) for block in message.content] == [("text", "")]
    assert message.stop_reason == "end_turn"


@WAYS
def test_a_spent_budget_ends_the_run_with_words_and_counting_is_no_part_of_it(gate: Gate, stream: bool) -> None:
    created, client = session(gate.says(["Hello."]), budgets={"max_requests": 1})
    for _ in range(3):
        client.messages.count_tokens(model="m", messages=[{"role": "user", "content": "Hi"}])
    say(client, stream=stream, **asking("Hi"))
    message = say(client, stream=stream, **asking("Hi"))
    assert message.stop_reason == "end_turn"
    assert "budget" in message.content[0].text
    assert len(turns_of(gate, created.id)) == 1


def test_refusals_have_the_apis_form_and_a_request_id(gate: Gate) -> None:
    created, client = session(gate.says(["Hello."]))
    with pytest.raises(anthropic.BadRequestError, match="prefill") as refused:
        client.messages.create(**{**asking(""), "messages": [{"role": "assistant", "content": "So"}]})
    assert refused.value.body["type"] == "error"
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.BadRequestError, match="forces tokens"):
        client.messages.create(**asking("Hi", tools=TOOLS, tool_choice={"type": "any"}))
    answer = client.messages.with_raw_response.create(**asking("Hi"))
    assert answer.headers["request-id"].startswith("req_")
    gate.gateway.client.finish_rollout(created.id, wire.FinishRollout(reward=1.0))
    with pytest.raises(anthropic.APIStatusError, match="is finished") as gone:
        client.messages.create(**asking("Hi"))
    assert gone.value.status_code == 410
    stranger = anthropic.Anthropic(base_url=gate.gateway.url, api_key="tg-none", max_retries=0)
    with pytest.raises(anthropic.NotFoundError) as unknown:
        stranger.messages.create(**asking("Hi"))
    assert unknown.value.body["error"]["type"] == "not_found_error"


def test_a_key_opens_the_plain_path_and_queries_and_betas_are_ignored(gate: Gate) -> None:
    created, _ = session(gate.says(["Hello."]))
    for given in ({"api_key": created.api_key}, {"auth_token": created.api_key}):
        client = anthropic.Anthropic(base_url=gate.gateway.url, max_retries=0, **given)
        message = client.beta.messages.create(**asking("Hi"), betas=["none-such-2030-01-01"], extra_query={"x": "y"})
        assert message.content[0].text == "Hello."
    doubled = anthropic.Anthropic(base_url=created.base_url, api_key=created.api_key, max_retries=0)
    assert doubled.messages.create(**asking("Hi")).content[0].text == "Hello."


def test_what_has_no_meaning_here_is_left_out_with_a_note(gate: Gate) -> None:
    created, client = session(gate.says(["Hello."]))
    search: Any = {"type": "web_search_20250305", "name": "web_search"}
    client.messages.create(
        **asking("Hi", tools=[*TOOLS, search], metadata={"user_id": "x"}),
        thinking={"type": "adaptive"},
        extra_body={"context_management": {"edits": []}, "none_such": 1},
    )
    (turn,) = turns_of(gate, created.id)
    assert set(turn.flags) == {"ignored:tool:web_search_20250305", "ignored:context_management", "ignored:none_such"}
    assert [tool["function"]["name"] for tool in turn.request["tools"]] == ["bash"]
    rendered = [body for body in gate.fake.engine.requests if "chat_template_kwargs" in json.dumps(body, default=str)]
    assert rendered


@WAYS
def test_an_engine_that_is_away_is_told_by_a_status_before_the_stream(gate: Gate, stream: bool) -> None:
    created, client = session(gate.says(["Hello."]))
    gate.fake.fail(Fault("refuse", times=-1))
    with pytest.raises(anthropic.APIStatusError) as refused:
        say(client, stream=stream, **asking("Hi"))
    assert refused.value.status_code in (502, 503)
    assert refused.value.body["error"]["type"] in ("api_error", "overloaded_error")
    gate.fake.fail(None)
    assert len(turns_of(gate, created.id)) == 0


def test_a_silent_engine_is_bridged_by_pings(start_fake: StartFake, start_gateway: StartGateway) -> None:
    fake = start_fake(["Hello."], settings=FakeSettings(latency_first_s=1.5))
    created, _ = session(start_gateway(fake.url, "--keepalive-s", "0.3"))
    url = created.base_url.removesuffix("/v1") + "/v1/messages?beta=true"
    answer = httpx.post(url, json={**asking("Hi"), "stream": True}, timeout=60)
    events = [line.removeprefix("event: ") for line in answer.text.splitlines() if line.startswith("event: ")]
    assert events[:2] == ["ping", "ping"]
    assert events[-1] == "message_stop"


@pytest.mark.engine
def test_the_real_vllm_splices_counts_and_takes_the_thinking_switch(smollm_engine: RealEngine, tmp_path: Path) -> None:
    with Tap(smollm_engine.url) as tap, GatewayProcess(tap.url, tmp_path / "store") as gateway:
        created, client = session(gateway)
        messages: list[Any] = [{"role": "user", "content": "Say a word."}]
        for stream in (False, True, False):
            prompt: dict[str, Any] = {"messages": messages, "system": "Be brief.", "thinking": {"type": "disabled"}}
            counted = client.messages.count_tokens(model="m", **prompt)
            message = say(client, stream=stream, **{**asking("Hi"), "max_tokens": 12, **prompt})
            assert counted.input_tokens == message.usage.input_tokens
            messages.append({"role": "assistant", "content": _echo(message)})
            messages.append({"role": "user", "content": "Another."})
        witnessed = rows_from(tap.generations())
    with StoreReader(gateway.store) as reader:
        turns = reader.turns(created.id)
    assert [turn.kind for turn in turns] == ["first", "spliced", "spliced"]
    assert len(witnessed) == 1
