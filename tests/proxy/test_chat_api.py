"""Chat completions as the openai SDK sees them, streamed and not, over a gateway process and a fake engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.engines import RealEngine
from tests.fake_engine.settings import FakeSettings, Fault
from tests.gateway_process import GatewayProcess
from tests.proxy.conftest import Gate, StartFake, StartGateway
from turngate.proxy.store.layout import StoreFolder
from turngate.proxy.store.turnstore import TurnStore
from turngate.proxy.turns import Turn

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": name,
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
    for name in ("read", "bash")
]
ODD = '{"path":  "ünïcode\\u2028.txt", "n": 1.50, "big": 12345678901234567890,"deep":{"b":[1e3, {}],"a":"}"}}'


def streamed(client: openai.OpenAI, **body: Any) -> tuple[dict[str, Any], list[Any]]:
    """The message that a stream adds up to, and its events."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}, "finish": None, "usage": None}
    events = list(client.chat.completions.create(stream=True, **body))
    for event in events:
        message["usage"] = event.usage or message["usage"]
        for choice in event.choices:
            message["finish"] = choice.finish_reason or message["finish"]
            message["content"] += choice.delta.content or ""
            message["reasoning"] += getattr(choice.delta, "reasoning", None) or ""
            for call in choice.delta.tool_calls or ():
                kept = message["calls"].setdefault(call.index, {"id": call.id, "name": "", "arguments": ""})
                kept["name"] += call.function.name or ""
                kept["arguments"] += call.function.arguments or ""
    return message, events


def turns_of(gateway: Any, rollout: str) -> list[Turn]:
    """What the store has, read by a second process's eyes."""
    with TurnStore(StoreFolder.find(gateway.store).turns(0), readonly=True) as store:
        return store.turns(rollout)


def ask(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "policy", "messages": [{"role": "user", "content": text}], **more}


class TestAnswers:
    def test_a_plain_answer_has_message_usage_and_finish_reason(self, gate: Gate) -> None:
        gateway = gate.says(["Hello there."])
        created, client = gateway.session()
        answer = client.chat.completions.create(**ask("Hi"))
        assert answer.choices[0].message.content == "Hello there."
        assert answer.choices[0].finish_reason == "stop"
        (turn,) = turns_of(gateway, created.id)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == turn.prompt_tokens
        assert answer.usage.completion_tokens == len(turn.completion_ids)

    def test_streamed_and_whole_answers_are_the_same_message_with_verbatim_arguments(self, gate: Gate) -> None:
        said = {
            "reasoning": "Let me look.",
            "content": "I read both.",
            "tool_calls": [{"name": "read", "arguments": ODD}, {"name": "bash", "arguments": "{}"}],
        }
        gateway = gate.says([said])
        whole = gateway.session()[1].chat.completions.create(**ask("Go", tools=TOOLS)).choices[0]
        pieces, _ = streamed(gateway.session()[1], **ask("Go", tools=TOOLS))
        calls = whole.message.tool_calls or []
        assert [call.function.arguments for call in calls] == [ODD, "{}"]
        assert [call["arguments"] for call in pieces["calls"].values()] == [ODD, "{}"]
        assert [call.function.name for call in calls] == [call["name"] for call in pieces["calls"].values()]
        assert pieces["content"].strip() == (whole.message.content or "").strip() == "I read both."
        assert pieces["finish"] == whole.finish_reason == "tool_calls"
        assert all(call["id"].isalnum() for call in pieces["calls"].values())
        assert len({call["id"] for call in pieces["calls"].values()}) == 2

    def test_usage_comes_in_an_event_without_choices_and_only_when_wanted(self, gate: Gate) -> None:
        gateway = gate.says(["Fine."])
        _, with_usage = streamed(gateway.session()[1], **ask("Hi", stream_options={"include_usage": True}))
        _, without = streamed(gateway.session()[1], **ask("Hi", stream_options={"include_usage": False}))
        assert with_usage[-1].choices == []
        assert with_usage[-1].usage.completion_tokens > 0
        assert all(event.usage is None and event.choices for event in without)

    @pytest.mark.parametrize("stream", [False, True])
    def test_nothing_of_a_stop_string_reaches_the_client_and_all_of_it_is_recorded(
        self, gate: Gate, stream: bool
    ) -> None:
        gateway = gate.says(["one two STOPPED three"])
        created, client = gateway.session()
        body = ask("Count", stop=["STOPPED"])
        if stream:
            content, finish = (lambda m: (m["content"], m["finish"]))(streamed(client, **body)[0])
        else:
            choice = client.chat.completions.create(**body).choices[0]
            content, finish = choice.message.content, choice.finish_reason
        assert (content, finish) == ("one two ", "stop")
        (turn,) = turns_of(gateway, created.id)
        assert turn.stop_reason == "STOPPED"

    def test_a_cut_inside_a_tool_call_stays_length(self, gate: Gate) -> None:
        gateway = gate.says([{"tool_calls": [{"name": "read", "arguments": ODD}]}])
        whole = gateway.session()[1].chat.completions.create(**ask("Go", tools=TOOLS, max_tokens=15)).choices[0]
        pieces, _ = streamed(gateway.session()[1], **ask("Go", tools=TOOLS, max_completion_tokens=15))
        assert whole.finish_reason == pieces["finish"] == "length"

    def test_the_stop_token_is_stored_and_never_shown(self, gate: Gate) -> None:
        gateway = gate.says(["Bye."])
        created, client = gateway.session()
        assert client.chat.completions.create(**ask("Hi")).choices[0].message.content == "Bye."
        (turn,) = turns_of(gateway, created.id)
        assert int(turn.completion_ids[-1]) in StoreFolder.find(gateway.store).stop_ids()

    def test_models_lists_the_policy(self, gate: Gate) -> None:
        gateway = gate.says(["x"])
        assert [model.id for model in gateway.session()[1].models.list()] == ["policy"]

    def test_the_plain_v1_takes_the_secret_as_a_key(self, gate: Gate) -> None:
        gateway = gate.says(["Hello."])
        created, _ = gateway.session()
        client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=created.api_key)
        assert client.chat.completions.create(**ask("Hi")).choices[0].message.content == "Hello."


class TestStreaming:
    def test_an_answer_of_two_seconds_comes_in_many_pieces_of_like_size(
        self, start_fake: StartFake, start_gateway: StartGateway
    ) -> None:
        words = "and so the story goes on with one more word " * 12
        gateway = start_gateway(start_fake([words], settings=FakeSettings(tokens_per_s=60.0)).url)
        created, client = gateway.session()
        pieces, events = streamed(client, **ask("Tell"))
        sizes = [len(c.delta.content) for e in events for c in e.choices if c.delta.content]
        (turn,) = turns_of(gateway, created.id)
        assert pieces["content"] == words.rstrip() or pieces["content"] == words
        assert len(turn.completion_ids) > 100
        assert len(sizes) >= 10
        assert max(sizes) <= len(words) / 3

    def test_tool_arguments_stream_too(self, start_fake: StartFake, start_gateway: StartGateway) -> None:
        long = json.dumps({"path": "a long argument " * 30})
        said = {"tool_calls": [{"name": "read", "arguments": long}]}
        gateway = start_gateway(start_fake([said], settings=FakeSettings(tokens_per_s=60.0)).url)
        _, events = streamed(gateway.session()[1], **ask("Go", tools=TOOLS))
        parts = [c.function.arguments for e in events for one in e.choices for c in one.delta.tool_calls or ()]
        assert "".join(part or "" for part in parts) == long
        assert sum(bool(part) for part in parts) >= 3  # as the output doubles: fewer where the machine is busy


@pytest.mark.engine
def test_a_response_format_is_a_grammar_on_the_real_engine_and_its_turn_is_exact(
    smollm_engine: RealEngine, tmp_path: Path
) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    with GatewayProcess(smollm_engine.url, tmp_path / "store") as gateway:
        created, client = gateway.session()
        messages: list[Any] = [{"role": "user", "content": "Say a number."}]
        for _ in range(2):
            answer = client.chat.completions.create(
                model="m", messages=messages, max_tokens=60, temperature=0.0, response_format=form
            )
            text = answer.choices[0].message.content or ""
            if answer.choices[0].finish_reason == "stop":
                assert isinstance(json.loads(text)["n"], int)
            assert text.lstrip().startswith("{")
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Another."}]
        one, two = turns_of(gateway, created.id)
        assert (one.kind, two.kind) == ("first", "spliced")
        assert len(two.logprobs) == len(two.completion_ids)


class TestHistory:
    def test_ten_turns_with_tools_are_one_spliced_path(self, gate: Gate) -> None:
        script = [{"content": f"Step {i}.", "tool_calls": [{"name": "read", "arguments": ODD}]} for i in range(9)]
        gateway = gate.says([*script, "Done."])
        created, client = gateway.session()
        messages: list[Any] = [{"role": "system", "content": "Work."}, {"role": "user", "content": "Go"}]
        for _ in range(10):
            message = client.chat.completions.create(model="m", messages=messages, tools=TOOLS).choices[0].message
            calls = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": json.dumps(json.loads(call.function.arguments)),
                    },
                }
                for call in message.tool_calls or ()
            ]
            messages.append(
                {"role": "assistant", "content": message.content, **({"tool_calls": calls} if calls else {})}
            )
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": "ok <|im_end|> ok"} for call in calls]
        turns = turns_of(gateway, created.id)
        assert [turn.kind for turn in turns] == ["first", *["spliced"] * 9]
        assert max(len(turn.tail_ids) for turn in turns[1:]) < 40

    def test_a_length_cut_turn_goes_on_with_an_unsampled_end_of_turn(self, gate: Gate) -> None:
        gateway = gate.says(["This answer is rather long, longer than allowed.", "Yes."])
        created, client = gateway.session()
        first = client.chat.completions.create(**ask("Hi", max_tokens=4)).choices[0]
        messages = [*ask("Hi")["messages"], {"role": "assistant", "content": first.message.content}]
        client.chat.completions.create(model="m", messages=[*messages, {"role": "user", "content": "Go on"}])
        one, two = turns_of(gateway, created.id)
        assert one.finish_reason == "length"
        assert two.kind == "spliced"
        assert int(two.tail_ids[0]) in StoreFolder.find(gateway.store).stop_ids()

    def test_a_template_that_drops_reasoning_breaks_faithfully_or_appends_by_setting(
        self, start_fake: StartFake, start_gateway: StartGateway
    ) -> None:
        fake = start_fake([{"reasoning": "Hm.", "content": "One."}, "Two."], template="drop-reasoning")
        gateway = start_gateway(fake.url)
        kinds = {}
        for history in ("template", "append"):
            created, client = gateway.session(history=history)
            message = client.chat.completions.create(**ask("Hi")).choices[0].message
            echo = {"role": "assistant", "content": message.content}
            client.chat.completions.create(
                model="m", messages=[*ask("Hi")["messages"], echo, {"role": "user", "content": "And?"}]
            )
            kinds[history] = [(turn.kind, turn.break_cause) for turn in turns_of(gateway, created.id)]
        assert kinds["template"] == [("first", None), ("break", "template_drops_reasoning")]
        assert kinds["append"] == [("first", None), ("spliced", None)]

    def test_the_same_request_again_is_another_sample_not_a_break(self, gate: Gate) -> None:
        gateway = gate.says(["Hello."])
        created, client = gateway.session()
        for _ in range(3):
            client.chat.completions.create(**ask("Hi"))
        assert [turn.kind for turn in turns_of(gateway, created.id)] == ["first"] * 3


class TestSampling:
    def test_the_policy_wins_and_both_are_recorded(self, gate: Gate) -> None:
        gateway = gate.says(["Fine."])
        created, client = gateway.session(sampling={"temperature": 0.7, "max_tokens": 50})
        client.chat.completions.create(**ask("Hi", temperature=0.1, top_p=0.5, max_tokens=99, logprobs=False))
        (turn,) = turns_of(gateway, created.id)
        assert turn.sampling_asked["temperature"] == 0.1
        assert turn.sampling_used["temperature"] == 0.7
        assert turn.sampling_used["top_p"] == 1.0, "training sessions sample the plain distribution"
        assert turn.sampling_used["max_tokens"] == 50
        assert "policy:temperature" in turn.flags
        assert len(turn.logprobs) == len(turn.completion_ids), "logprobs: false loses nothing"
        sent = gate.fake.seen("/inference/v1/generate")[-1]["sampling_params"]
        assert sent["temperature"] == 0.7

    def test_a_huge_max_tokens_is_clamped_and_noted(self, start_fake: StartFake, start_gateway: StartGateway) -> None:
        gateway = start_gateway(start_fake(["Fine."], settings=FakeSettings(max_model_len=2048)).url)
        created, client = gateway.session()
        client.chat.completions.create(**ask("Hi", max_tokens=65536))
        (turn,) = turns_of(gateway, created.id)
        assert turn.prompt_tokens + turn.sampling_used["max_tokens"] == 2048
        assert "clamped:max_tokens" in turn.flags

    def test_alternatives_are_stored_when_asked_for(self, gate: Gate) -> None:
        gateway = gate.says(["Fine."])
        created, client = gateway.session(top_logprobs=3)
        client.chat.completions.create(**ask("Hi"))
        (turn,) = turns_of(gateway, created.id)
        assert turn.top_ids is not None
        assert turn.top_logprobs is not None
        assert turn.top_ids.shape == turn.top_logprobs.shape == (len(turn.completion_ids), 3)
        assert turn.top_logprobs.dtype == "float16"


class TestRefusals:
    @pytest.mark.parametrize(
        ("body", "words"),
        [
            ({"n": 2}, "n > 1"),
            ({"tool_choice": "required", "tools": TOOLS}, "tool_choice"),
            ({"temperature": 9}, "temperature must be a number from 0.0 to 2.0"),
            ({"max_tokens": 0}, "max_tokens must be a whole number"),
            ({"messages": []}, "messages must be a list of at least one"),
            ({"messages": [{"role": "cat", "content": ""}]}, "messages[0].role"),
            ({"stop": [1]}, "stop must be a string or a list"),
            ({"tools": [{}]}, "tools[0]"),
        ],
    )
    def test_a_wrong_request_is_a_400_that_names_the_field(self, body: dict[str, Any], words: str, gate: Gate) -> None:
        gateway = gate.says(["x"])
        created, _ = gateway.session()
        answer = httpx.post(f"{created.base_url}/chat/completions", json={**ask("Hi"), **body})
        error = answer.json()["error"]
        assert answer.status_code == 400
        assert words in error["message"]
        assert error["type"] == "invalid_request_error"

    def test_bad_json_unknown_secret_closed_session_and_missing_key_say_what_to_do(self, gate: Gate) -> None:
        gateway = gate.says(["x"])
        created, _ = gateway.session()
        from turngate.proxy import wire

        post = httpx.post
        assert post(f"{created.base_url}/chat/completions", content=b"{").status_code == 400
        assert post(f"{gateway.url}/s/tg-nope/v1/chat/completions", json=ask("Hi")).status_code == 404
        assert post(f"{gateway.url}/v1/chat/completions", json=ask("Hi")).status_code == 401
        assert post(f"{gateway.url}/rollouts", json={"task": "t"}).status_code == 401
        key = {"authorization": f"Bearer {created.api_key}"}
        assert post(f"{gateway.url}/rollouts", json={"task": "t"}, headers=key).status_code == 401
        gateway.client.finish_rollout(created.id, wire.FinishRollout(reward=1.0))
        closed = post(f"{created.base_url}/chat/completions", json=ask("Hi"))
        assert closed.status_code == 410
        assert "create a new one" in closed.json()["error"]["message"]

    def test_training_on_raw_log_probs_is_refused(self, start_fake: StartFake, start_gateway: StartGateway) -> None:
        gateway = start_gateway(start_fake(["x"], settings=FakeSettings(raw_logprobs=True)).url)
        with pytest.raises(Exception, match="--logprobs-mode processed_logprobs"):
            gateway.session()
        assert gateway.session(training=False)[1].chat.completions.create(**ask("Hi")).choices

    def test_a_full_context_and_a_spent_budget_end_the_run_with_a_normal_answer(
        self, start_fake: StartFake, start_gateway: StartGateway
    ) -> None:
        from turngate.proxy import wire

        gateway = start_gateway(start_fake(["x"], settings=FakeSettings(max_model_len=2048)).url)
        created, client = gateway.session(budgets={"max_requests": 1})
        full = client.chat.completions.create(**ask("word " * 4000))
        spent = client.chat.completions.create(**ask("Hi"))
        assert full.choices[0].finish_reason == spent.choices[0].finish_reason == "stop"
        info = gateway.client.finish_rollout(created.id, wire.FinishRollout(reward=0.0))
        assert info.metrics["flags"] == ["budget:requests", "context_overflow"]
        assert info.turns == 0

    @pytest.mark.parametrize("kind", ["error", "drop", "refuse", "abort"])
    def test_a_failing_engine_is_an_error_never_an_answer(self, kind: Any, gate: Gate) -> None:
        gateway = gate.says(["A long enough answer to break in the middle of it."])
        created, client = gateway.session()
        gate.fake.fail(Fault(kind, after_tokens=1, times=-1))
        with pytest.raises(openai.APIStatusError):
            client.chat.completions.create(**ask("Hi"))
        with pytest.raises(openai.APIError):
            streamed(client, **ask("Hi"))
        assert turns_of(gateway, created.id) == []
        gate.fake.fail(None)
        assert client.chat.completions.create(**ask("Hi")).choices[0].finish_reason == "stop"


def test_transparent_mode_records_what_a_plain_engine_reports(
    start_fake: StartFake, start_gateway: StartGateway
) -> None:
    gateway = start_gateway(start_fake(["One.", "Two."], settings=FakeSettings(exact=False)).url)
    created, client = gateway.session()
    message = client.chat.completions.create(**ask("Hi")).choices[0].message
    pieces, _ = streamed(
        client,
        model="m",
        messages=[
            *ask("Hi")["messages"],
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": "And?"},
        ],
    )
    one, two = turns_of(gateway, created.id)
    assert (message.content, pieces["content"]) == ("One.", "Two.")
    assert one.mode == two.mode == "transparent"
    assert (one.kind, two.kind) == ("first", "spliced")
    assert len(two.logprobs) == len(two.completion_ids) > 0
