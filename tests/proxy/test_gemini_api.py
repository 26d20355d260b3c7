"""Gemini's wire as the google-genai SDK sees it, over a gateway process and a fake engine."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest
from google.genai import errors, types

from tests.engines import RealEngine
from tests.fake_engine.settings import FakeSettings
from tests.gateway_process import GatewayProcess
from tests.proxy.conftest import Gate, StartFake, StartGateway
from tests.proxy.gemini_sdk import CONFIG, ask, calls_of, converse, respond, say, sdk, session
from tests.proxy.test_chat_api import ODD, turns_of
from tests.proxy.test_exact_rows import leased_rows
from tests.tap import Tap, rows_from
from turngate.proxy import wire
from turngate.proxy.verify import verify_store

SCRIPT = [
    {"reasoning": "Hm.", "content": "Reading.", "tool_calls": [{"name": "bash", "arguments": '{"a":  1.50}'}]},
    {"tool_calls": [{"name": "bash", "arguments": '{"b": "}"}'}, {"name": "bash", "arguments": '{"c": 1e3}'}]},
    {"tool_calls": [{"name": "bash", "arguments": '{"broken": '}]},
    {"tool_calls": [{"name": "read", "arguments": ODD}, {"name": "read", "arguments": ODD}]},
    {"tool_calls": [{"name": "read", "arguments": '{"path": "a"}'}, {"name": "bash", "arguments": "[1]"}]},
    "Plain text, no call.  ",
]
STREAM = [True, False]


@pytest.mark.parametrize("stream", STREAM)
def test_an_answer_has_its_text_its_calls_its_usage_and_its_reason(gate: Gate, stream: bool) -> None:
    gateway = gate.says([SCRIPT[0]])
    created, client = session(gateway)
    shown = CONFIG.model_copy(update={"thinking_config": types.ThinkingConfig(include_thoughts=True)})
    said, last = ask(client, [say("Read it.")], stream=stream, config=shown)
    parts = [part for content in said for part in content.parts or ()]
    assert "".join(part.text for part in parts if part.text and part.thought) == "Hm."
    assert "".join(part.text for part in parts if part.text and not part.thought).strip() == "Reading."
    (call,) = calls_of(said)
    assert (call.name, call.args) == ("bash", {"a": 1.5})
    (turn,) = turns_of(gateway, created.id)
    assert call.id == turn.response["tool_calls"][0]["id"]
    assert turn.response["tool_calls"][0]["function"]["arguments"] == '{"a":  1.50}'
    assert last.candidates[0].finish_reason == types.FinishReason.STOP
    assert last.model_version == "m"
    assert last.response_id == turn.id
    assert last.usage_metadata.prompt_token_count == turn.prompt_tokens
    assert last.usage_metadata.candidates_token_count == len(turn.completion_ids)
    hidden, _ = ask(client, [say("Read that.")], stream=stream)
    assert not [part for content in hidden for part in content.parts or () if part.thought]


def test_text_streams_as_it_grows_and_ends_with_its_limit(gate: Gate) -> None:
    gateway = gate.says(["one two three four five six seven eight nine ten"])
    _, client = session(gateway)
    short = CONFIG.model_copy(update={"max_output_tokens": 6, "tools": None})
    said, last = ask(client, [say("Count.")], stream=True, config=short)
    assert len(said) > 1
    assert last.candidates[0].finish_reason == types.FinishReason.MAX_TOKENS


def test_six_turns_are_rows_equal_to_what_crossed_the_wire(start_fake: StartFake, start_gateway: StartGateway) -> None:
    rng, created, witnessed = random.Random(11), [], {}
    with Tap(start_fake(SCRIPT).url) as tap:
        gateway = start_gateway(tap.url)
        for text in ("Task 0", "Task 1", "Task 2"):
            before = len(tap.generations())
            one, client = session(gateway, group="g", group_size=3, history="append")
            converse(client, text, 6, rng)
            created.append(one)
            witnessed[one.id] = rows_from(tap.generations()[before:])
        status = gateway.client.status()
        assert (status.turns, status.spliced, status.breaks) == (18, 15, {})
        assert leased_rows(gateway, "g", created) == witnessed
        assert verify_store(gateway.store).problems == []


def test_a_history_survives_a_restart_of_the_gateway(start_fake: StartFake, start_gateway: StartGateway) -> None:
    gateway = start_gateway(start_fake(SCRIPT).url)
    created, client = session(gateway, history="append")
    contents = [say("Task")]
    for again in range(2):
        said, _ = ask(client, contents, stream=True)
        contents += [*said, respond(calls_of(said), random.Random(1), ids=False)]
        if again:
            gateway.kill()
            gateway.start()
    ask(client, contents, stream=False)
    assert [turn.kind for turn in turns_of(gateway, created.id)] == ["first", "spliced", "spliced"]


def test_counting_gives_what_the_turn_then_uses_and_leaves_no_trace(gate: Gate) -> None:
    gateway = gate.says(SCRIPT)
    created, client = session(gateway, budgets={"max_requests": 3})
    contents = [say("Task")]
    for _ in range(3):
        body = {"contents": [content.model_dump(mode="json", exclude_none=True) for content in contents]}
        tools = [tool.model_dump(mode="json", exclude_none=True) for tool in CONFIG.tools or ()]
        body |= {"systemInstruction": {"parts": [{"text": "Be brief."}]}, "tools": tools}
        url = f"{created.base_url}/models/m:countTokens"
        counted = httpx.post(url, json={"generateContentRequest": body}, timeout=60).json()
        said, last = ask(client, contents, stream=True)
        assert counted["totalTokens"] == last.usage_metadata.prompt_token_count
        contents += [*said, respond(calls_of(said), random.Random(1), ids=False) if calls_of(said) else say("On.")]
    assert client.models.count_tokens(model="m", contents=[say("Hi")]).total_tokens > 0
    assert len(turns_of(gateway, created.id)) == 3
    gateway.client.finish_rollout(created.id, wire.FinishRollout(reward=0.0))
    assert "flags" not in gateway.client.rollout(created.id).metrics


def test_a_spent_budget_and_a_full_context_end_the_run_with_a_normal_answer(gate: Gate) -> None:
    gateway = gate.says(["Hello."])
    created, client = session(gateway, budgets={"max_requests": 1})
    ask(client, [say("Hi")], stream=False)
    said, last = ask(client, [say("Hi again")], stream=True)
    assert "budget" in (said[0].parts or [])[0].text
    assert last.candidates[0].finish_reason == types.FinishReason.STOP
    gateway.client.finish_rollout(created.id, wire.FinishRollout(reward=0.0))
    assert gateway.client.rollout(created.id).metrics["flags"] == ["budget:requests"]


@pytest.mark.parametrize("api", ["v1beta", "v1"])
def test_the_key_may_stand_in_a_header_or_in_the_query_and_is_never_logged(gate: Gate, api: str) -> None:
    gateway = gate.says(["Hello."])
    created, _ = session(gateway)
    url, body = f"{gateway.url}/{api}/models/m:generateContent", {"contents": [{"parts": [{"text": "Hi"}]}]}
    assert httpx.post(url, json=body, headers={"x-goog-api-key": created.api_key}, timeout=60).status_code == 200
    assert httpx.post(url, json=body, params={"key": created.api_key}, timeout=60).status_code == 200
    wrong = httpx.post(f"{url}x", json=body, params={"key": created.api_key})
    assert wrong.status_code == 405
    assert created.api_key not in wrong.text + gateway.log.read_text()
    refused = httpx.post(url, json=body, params={"key": "tg-s-0000"})
    assert refused.status_code in (401, 404)
    assert refused.json()["error"]["status"] in ("UNAUTHENTICATED", "NOT_FOUND")


def test_without_sse_a_stream_is_one_json_array(gate: Gate) -> None:
    gateway = gate.says([SCRIPT[1]])
    created, _ = session(gateway)
    url = f"{created.base_url}/models/m:streamGenerateContent"
    answer = httpx.post(url, json={"contents": {"parts": {"text": "Hi"}}, "tools": []}, timeout=60)
    assert answer.headers["content-type"].startswith("application/json")
    parts = [part for event in answer.json() for part in event["candidates"][0]["content"]["parts"]]
    assert [part["functionCall"]["args"] for part in parts if "functionCall" in part] == [{"b": "}"}, {"c": 1000.0}]


def test_models_are_listed_and_found_in_googles_form(gate: Gate) -> None:
    gateway = gate.says(["Hello."])
    created, client = session(gateway)
    (model,) = client.models.list()
    plain_client = sdk(gateway.url, created.api_key)
    (plain,) = plain_client.models.list()
    assert plain.name == model.name
    assert model.name == f"models/{created.policy}"
    assert client.models.get(model="anything").input_token_limit == model.input_token_limit > 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"contents": []}, "contents must be a list"),
        ({"contents": [{"role": "assistant", "parts": []}]}, "use user or model"),
        ({"contents": [{"parts": [{"inlineData": {"mimeType": "image/png", "data": ""}}]}]}, "inlineData cannot be"),
        ({"contents": [{"parts": [{"text": 1}]}]}, "contents[0].parts[0] must be"),
        ({"generationConfig": {"candidateCount": 2}}, "candidateCount > 1"),
        ({"generationConfig": {"responseMimeType": "text/x.enum"}}, "responseMimeType"),
        ({"generation_config": {"temperature": "hot"}}, "temperature"),
        ({"tools": [{"functionDeclarations": [{}]}]}, "functionDeclarations[0]"),
        ({"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}, "tools": []}, "cannot be trained"),
    ],
)
def test_what_cannot_be_served_is_refused_in_googles_form(gate: Gate, change: dict[str, Any], words: str) -> None:
    created, _ = session(gate.says(["Hello."]))
    body = {"contents": [{"parts": [{"text": "Hi"}]}], **change}
    answer = httpx.post(f"{created.base_url}/models/m:generateContent", json=body, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["status"]) == (400, 400, "INVALID_ARGUMENT")
    assert words in error["message"]


def test_the_sdk_raises_the_refusal_as_its_own_error(gate: Gate) -> None:
    gateway = gate.says(["Hello."])
    created, client = session(gateway)
    gateway.client.finish_rollout(created.id, wire.FinishRollout(reward=0.0))
    with pytest.raises(errors.ClientError) as caught:
        ask(client, [say("Hi")], stream=True)
    assert (caught.value.code, caught.value.status) == (410, "FAILED_PRECONDITION")
    with pytest.raises(errors.ClientError):
        ask(sdk(f"{gateway.url}/s/tg-s-none"), [say("Hi")], stream=False)


def test_tools_that_are_no_functions_are_left_out_with_a_note(gate: Gate) -> None:
    gateway = gate.says(["Hello."])
    created, client = session(gateway)
    config = CONFIG.model_copy(
        update={"tools": [*(CONFIG.tools or ()), types.Tool(google_search=types.GoogleSearch())]}
    )
    ask(client, [say("Hi")], stream=False, config=config)
    (turn,) = turns_of(gateway, created.id)
    assert "ignored_tool:googleSearch" in turn.flags
    assert [tool["function"]["name"] for tool in turn.request["tools"]] == ["read", "bash"]
    schema = turn.request["tools"][0]["function"]["parameters"]
    assert schema == {"type": "object", "properties": {"path": {"type": ["string", "null"]}}}


def test_wishes_are_kept_in_our_words(gate: Gate) -> None:
    gateway = gate.says(["Hello."])
    created, client = session(gateway)
    config = types.GenerateContentConfig(
        temperature=0.5, top_p=0.9, top_k=40, max_output_tokens=50, stop_sequences=["END"], seed=3, candidate_count=1
    )
    ask(client, [say("Hi")], stream=False, config=config)
    (turn,) = turns_of(gateway, created.id)
    asked = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "max_tokens": 50, "stop": ["END"], "seed": 3, "n": 1}
    assert turn.sampling_asked == asked


def test_a_schema_shapes_the_answer_where_one_is_asked_for(gate: Gate) -> None:
    gateway = gate.says(['{"a": 1}'])
    created, client = session(gateway)
    schema = types.Schema(type=types.Type.OBJECT, properties={"a": types.Schema(type=types.Type.INTEGER)})
    config = types.GenerateContentConfig(response_mime_type="application/json", response_schema=schema)
    ask(client, [say("Hi")], stream=False, config=config)
    (turn,) = turns_of(gateway, created.id)
    assert "shaped:response_format" in turn.flags
    asked = turn.sampling_asked["response_format"]["json_schema"]["schema"]
    assert json.dumps(asked) == '{"properties": {"a": {"type": "integer"}}, "type": "object"}'


def test_an_engine_that_is_silent_for_long_is_bridged_by_empty_lines(
    start_fake: StartFake, start_gateway: StartGateway
) -> None:
    fake = start_fake(["Hello there."])
    fake.engine.settings = FakeSettings(latency_first_s=1.5)
    gateway = start_gateway(fake.url, "--keepalive-s", "0.2")
    created, client = session(gateway)
    said, last = ask(client, [say("Hi")], stream=True)
    assert "".join(part.text or "" for content in said for part in content.parts or ()) == "Hello there."
    assert last.candidates[0].finish_reason == types.FinishReason.STOP
    url, body = f"{created.base_url}/models/m:streamGenerateContent", {"contents": {"parts": {"text": "Hi"}}}
    events = httpx.post(url, params={"alt": "sse"}, json=body, timeout=60).text
    assert events.startswith("\r\n\r\n")
    array = httpx.post(url, json=body, timeout=60)
    assert array.text.startswith("\r\n")
    assert array.json()[-1]["candidates"][0]["finishReason"] == "STOP"


def test_calls_may_be_forced_where_turns_are_not_trained(gate: Gate) -> None:
    gateway = gate.says([SCRIPT[0]])
    created, client = session(gateway, training=False)
    calling = types.FunctionCallingConfig(mode=types.FunctionCallingConfigMode.ANY, allowed_function_names=["bash"])
    config = CONFIG.model_copy(update={"tool_config": types.ToolConfig(function_calling_config=calling)})
    ask(client, [say("Hi")], stream=False, config=config)
    (turn,) = turns_of(gateway, created.id)
    assert turn.sampling_asked["tool_choice"] == {"type": "function", "function": {"name": "bash"}}


@pytest.mark.engine
def test_rows_equal_what_crossed_the_wire_of_the_real_vllm(smollm_engine: RealEngine, tmp_path: Path) -> None:
    config = types.GenerateContentConfig(max_output_tokens=8, system_instruction="Be brief.")
    with Tap(smollm_engine.url) as tap, GatewayProcess(tap.url, tmp_path / "store") as gateway:
        created, witnessed = [], {}
        for text in ("Say a word.", "Name a colour."):
            before = len(tap.generations())
            one, client = session(gateway, group="g", group_size=2)
            converse(client, text, 3, random.Random(5), config)
            created.append(one)
            witnessed[one.id] = rows_from(tap.generations()[before:])
        assert gateway.client.status().breaks == {}
        assert leased_rows(gateway, "g", created) == witnessed
