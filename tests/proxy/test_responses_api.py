"""Responses as the openai SDK sees them, streamed and not, over a gateway process and a fake engine."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.engines import RealEngine
from tests.fake_engine.settings import FakeSettings, Fault
from tests.gateway_process import GatewayProcess
from tests.proxy.conftest import Gate, StartFake, StartGateway
from tests.proxy.test_chat_api import ODD, turns_of
from tests.proxy.test_exact_rows import leased_rows
from tests.tap import Tap, rows_from
from turngate.proxy import wire
from turngate.proxy.verify import verify_store

TOKEN: Any = ["reasoning.encrypted_content"]
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: X"}
TOOLS: list[Any] = [
    {"type": "function", "name": "read", "parameters": {"type": "object"}, "strict": False},
    {"type": "namespace", "name": "crm", "description": "x", "tools": [{"type": "function", "name": "find"}]},
    {
        "type": "custom",
        "name": "apply_patch",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: X"},
    },
    {"type": "web_search"},
    {"type": "image_generation"},
]
CALLS = [
    {"name": "read", "arguments": ODD},
    {"name": "crm__find", "arguments": "{ }"},
    {"name": "apply_patch", "arguments": '{"input": "*** Begin\\n+\\u00e9"}'},
    {"name": "apply_patch", "arguments": '{"input": "x", "more": 1}'},
]


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def echoed(output: Iterable[Any]) -> list[dict[str, Any]]:
    """Output items as an agent sends them back."""
    return [item.model_dump(exclude_none=True, by_alias=True) for item in output]


def results(output: Iterable[Any]) -> list[dict[str, Any]]:
    """A result for every call, the last call's first."""
    calls = [item for item in output if item.type in ("function_call", "custom_tool_call")]
    return [{"type": f"{one.type}_output", "call_id": one.call_id, "output": "done é"} for one in reversed(calls)]


def streamed(client: openai.OpenAI, **body: Any) -> tuple[Any, list[Any]]:
    """The last event's response, and all events."""
    events = list(client.responses.create(stream=True, model="policy", **body))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    return events[-1].response, events


def said(output: Iterable[Any]) -> list[Any]:
    """What items say, without ids."""
    return [
        {key: value for key, value in item.items() if key not in ("id", "call_id", "status", "encrypted_content")}
        for item in echoed(output)
    ]


class TestAnswers:
    def test_a_text_in_gives_a_text_out_with_usage(self, gate: Gate) -> None:
        gateway = gate.says(["Hello there."])
        created, client = gateway.session()
        answer = client.responses.create(model="policy", input="Hi", instructions="Be brief.")
        assert (answer.output_text, answer.status, answer.instructions) == ("Hello there.", "completed", "Be brief.")
        (turn,) = turns_of(gateway, created.id)
        assert answer.usage is not None
        assert (answer.usage.input_tokens, answer.usage.output_tokens) == (turn.prompt_tokens, len(turn.completion_ids))
        assert [message["role"] for message in turn.request["messages"]] == ["system", "user"]

    def test_streamed_and_whole_answers_are_the_same_items(self, gate: Gate) -> None:
        gateway = gate.says([{"reasoning": "Let me look.", "content": "I read.", "tool_calls": CALLS}])
        body: dict[str, Any] = {"input": [user("Go")], "tools": TOOLS, "include": TOKEN}
        whole = gateway.session()[1].responses.create(model="policy", **body)
        final, events = streamed(gateway.session()[1], **body)
        assert said(whole.output) == said(final.output)
        kinds = ["reasoning", "message", "function_call", "function_call", "custom_tool_call", "custom_tool_call"]
        assert [item.type for item in whole.output] == kinds
        read, find, patch, odd = whole.output[2:]
        assert (read.name, read.arguments, find.name, find.namespace) == ("read", ODD, "find", "crm")
        assert (patch.name, patch.input) == ("apply_patch", "*** Begin\n+é")
        assert odd.input == '{"input": "x", "more": 1}'
        done = [event.item for event in events if event.type == "response.output_item.done"]
        assert sorted(item.id for item in done) == sorted(item.id for item in final.output)
        deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        assert "".join(deltas) == ODD + "{ }"

    def test_the_sdks_stream_helper_follows_the_events(self, gate: Gate) -> None:
        gateway = gate.says([{"reasoning": "Hm.", "content": "Reading.", "tool_calls": CALLS[:2]}])
        with gateway.session()[1].responses.stream(model="policy", input="Go", tools=TOOLS) as stream:
            texts = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
            final = stream.get_final_response()
        assert texts[-1].strip() == "Reading."
        assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]

    def test_the_first_text_comes_while_the_engine_is_still_sampling(
        self, start_fake: StartFake, start_gateway: StartGateway
    ) -> None:
        fake = start_fake(["word " * 40], settings=FakeSettings(tokens_per_s=40))
        _, client = start_gateway(fake.url).session()
        for event in client.responses.create(model="policy", input="Hi", stream=True):
            if event.type == "response.output_text.delta":
                assert fake.engine.running
                return
        pytest.fail("no text")

    @pytest.mark.parametrize("stream", [False, True])
    def test_an_answer_cut_by_its_limit_is_incomplete(self, gate: Gate, stream: bool) -> None:
        gateway = gate.says(["one two three four five six"])
        client = gateway.session()[1]
        body: dict[str, Any] = {"input": "Count", "max_output_tokens": 3}
        answer = streamed(client, **body)[0] if stream else client.responses.create(model="policy", **body)
        assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert answer.output[-1].status == "incomplete"

    def test_an_empty_answer_is_an_empty_message(self, gate: Gate) -> None:
        final, _ = streamed(gate.says([""]).session()[1], input="Hi")
        assert [(item.type, item.content[0].text) for item in final.output] == [("message", "")]

    def test_a_schema_for_the_text_reaches_the_engine(self, gate: Gate) -> None:
        gateway = gate.says(["{}"])
        form: Any = {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}, "strict": True}}
        effort: Any = {"effort": "low"}
        gateway.session(training=False)[1].responses.create(model="policy", input="Hi", text=form, reasoning=effort)
        asked = gate.fake.seen("/v1/chat/completions/render")[-1]
        wanted = {"name": "a", "schema": {"type": "object"}, "strict": True}
        assert asked["response_format"] == {"type": "json_schema", "json_schema": wanted}
        assert asked["reasoning_effort"] == "low"


class TestHistory:
    @pytest.mark.parametrize("keep_ids", [True, False])
    def test_six_turns_of_odd_calls_are_one_row_as_it_crossed_the_wire(
        self, start_fake: StartFake, start_gateway: StartGateway, keep_ids: bool
    ) -> None:
        script = [{"content": "  Look.\n", "tool_calls": CALLS}, {"tool_calls": CALLS[:1]}, "Some words.  "] * 2
        with Tap(start_fake(script).url) as tap:
            gateway = start_gateway(tap.url)
            witnessed = {}
            sessions = [gateway.session(group="g", group_size=2) for _ in range(2)]
            for number, (created, client) in enumerate(sessions):
                before = len(tap.generations())
                self._converse(client, stream=bool(number), keep_ids=keep_ids)
                witnessed[created.id] = rows_from(tap.generations()[before:])
                kinds = [turn.kind for turn in turns_of(gateway, created.id)]
                assert kinds == ["first", *["spliced"] * 5]
            assert leased_rows(gateway, "g", [created for created, _ in sessions]) == witnessed
            assert {len(rows) for rows in witnessed.values()} == {1}
            report = verify_store(gateway.store)
            assert (report.problems, report.rows) == ([], report.exact_rows)

    def _converse(self, client: openai.OpenAI, *, stream: bool, keep_ids: bool) -> None:
        items: list[Any] = [{"role": "developer", "content": "Be brief."}, user("Go")]
        body: dict[str, Any] = {"instructions": "You are.", "tools": TOOLS, "include": TOKEN, "store": False}
        for _ in range(6):
            if stream:
                answer = streamed(client, input=items, **body)[0]
            else:
                answer = client.responses.create(model="policy", input=items, **body)
            echo = echoed(answer.output)
            items += echo if keep_ids else [{k: v for k, v in item.items() if k != "id"} for item in echo]
            items += results(answer.output) or [user("Go on."), {"role": "developer", "content": "Hurry."}]

    @pytest.mark.parametrize("lost", [(), ("content",), ("content", "encrypted_content"), ("id", "status", "content")])
    def test_reasoning_comes_back_by_text_or_token_and_never_changes_what_history_means(
        self, gate: Gate, lost: tuple[str, ...]
    ) -> None:
        gateway = gate.says([{"reasoning": "Let me look.", "content": "Hm."}, "Done."])
        created, client = gateway.session(history="append")
        first = client.responses.create(model="policy", input="Go", include=TOKEN)
        assert client.responses.create(model="policy", input="Go", include=TOKEN).output[0].encrypted_content == (
            first.output[0].encrypted_content
        )
        thought, answer = echoed(first.output)
        items: list[Any] = [user("Go"), {k: v for k, v in thought.items() if k not in lost}, answer, user("More")]
        assert client.responses.create(model="policy", input=items).output_text == "Done."
        assert [turn.kind for turn in turns_of(gateway, created.id)] == ["first", "first", "spliced"]

    def test_a_changed_result_is_a_break(self, gate: Gate) -> None:
        gateway = gate.says([{"tool_calls": CALLS[:1]}, {"tool_calls": CALLS[:1]}, "Done."])
        created, client = gateway.session()
        items: list[Any] = [user("Go")]
        for _ in range(2):
            answer = client.responses.create(model="policy", input=items, tools=TOOLS)
            items += [*echoed(answer.output), *results(answer.output)]
        items[2]["output"] = "another"
        client.responses.create(model="policy", input=items, tools=TOOLS)
        assert [turn.kind for turn in turns_of(gateway, created.id)] == ["first", "spliced", "break"]

    def test_what_is_left_out_is_noted_on_the_turn(self, gate: Gate) -> None:
        gateway = gate.says(["Fine."])
        created, client = gateway.session()
        more: Any = {"truncation": "auto", "metadata": {"a": "b"}, "prompt_cache_key": "k"}
        client.responses.create(model="policy", input="Hi", tools=TOOLS, store=True, **more)
        (turn,) = turns_of(gateway, created.id)
        assert set(turn.flags) == {
            "ignored_tool:web_search",
            "ignored_tool:image_generation",
            "ignored:store",
            "ignored:truncation",
        }
        names = [tool["function"]["name"] for tool in turn.request["tools"]]
        assert names == ["read", "crm__find", "apply_patch"]
        assert "start: X" in turn.request["tools"][2]["function"]["description"]


class TestRefusals:
    @pytest.mark.parametrize(
        ("body", "words"),
        [
            ({"previous_response_id": "resp_1", "input": "Hi"}, "send the whole conversation as input"),
            ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "send the item itself"),
            ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "text only"),
            ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type is 'web_search_call'"),
            ({"input": []}, "input must be"),
            ({"input": "Hi", "background": True}, "background"),
            ({"input": "Hi", "tools": [{"type": "function"}]}, "tools[0].name"),
            ({"input": "Hi", "tools": [TOOLS[1], {"type": "function", "name": "crm__find"}]}, "another name"),
            ({"input": "Hi", "tool_choice": {"type": "function", "name": "nothing"}}, "tool_choice"),
            ({"input": "Hi", "tool_choice": "required", "tools": TOOLS}, "cannot be trained"),
            ({"input": "Hi", "max_output_tokens": 0}, "max_output_tokens"),
            ({"input": [{"type": "function_call", "name": "x", "arguments": "{}"}]}, "input[0].call_id"),
        ],
    )
    def test_a_wrong_request_is_a_400_that_says_what_to_do(self, gate: Gate, body: dict[str, Any], words: str) -> None:
        client = gate.says(["x"]).session()[1]
        with pytest.raises(openai.BadRequestError) as caught:
            client.post("/responses", body=body, cast_to=httpx.Response)
        assert words in caught.value.message
        assert set(caught.value.body or {}) == {"message", "type", "param", "code"}  # type: ignore[call-overload]

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_spent_budget_ends_the_run_with_a_message(self, gate: Gate, stream: bool) -> None:
        gateway = gate.says(["Hello."])
        created, client = gateway.session(budgets={"max_requests": 1})
        client.responses.create(model="policy", input="Hi")
        body: dict[str, Any] = {"input": "Again"}
        answer = streamed(client, **body)[0] if stream else client.responses.create(model="policy", **body)
        assert answer.status == "completed"
        assert "budget" in answer.output[0].content[0].text
        gateway.client.finish_rollout(created.id, wire.FinishRollout(reward=0.0))
        assert gateway.client.rollout(created.id).metrics["flags"] == ["budget:requests"]

    def test_a_full_context_ends_the_run_with_a_message(self, gate: Gate) -> None:
        answer = gate.says(["x"]).session()[1].responses.create(model="policy", input="word " * 40_000)
        assert (answer.status, answer.output_text) == (
            "completed",
            "The context window is full, so this run ends here.",
        )

    def test_too_many_at_once_is_a_429(self, start_fake: StartFake, start_gateway: StartGateway) -> None:
        fake = start_fake(["word " * 60], settings=FakeSettings(tokens_per_s=20))
        _, client = start_gateway(fake.url).session(budgets={"max_concurrency": 1})
        with client.responses.create(model="policy", input="Hi", stream=True) as stream:
            next(iter(stream))
            with pytest.raises(openai.RateLimitError) as caught:
                client.responses.create(model="policy", input="Hi")
        assert set(caught.value.body or {}) == {"message", "type", "param", "code"}  # type: ignore[call-overload]

    @pytest.mark.parametrize("stream", [False, True])
    def test_an_engine_that_is_away_is_a_503_before_the_first_byte(
        self, start_fake: StartFake, start_gateway: StartGateway, stream: bool
    ) -> None:
        fake = start_fake(["x"])
        _, client = start_gateway(fake.url, "--failover-wait-s", "0.3").session()
        fake.stop()
        with pytest.raises(openai.InternalServerError) as caught:
            list(client.responses.create(model="policy", input="Hi", stream=stream))
        assert caught.value.status_code == 503

    def test_a_fault_after_the_first_byte_is_a_failed_response(
        self, start_fake: StartFake, start_gateway: StartGateway
    ) -> None:
        fake = start_fake(["word " * 40])
        _, client = start_gateway(fake.url, "--keepalive-s", "0.2", "--failover-wait-s", "0.5").session()
        fake.fail(Fault("error", times=-1))
        final, events = streamed(client, input="Hi")
        assert (events[-1].type, final.status, final.error.code) == ("response.failed", "failed", "server_error")

    def test_silence_is_filled_with_response_in_progress(
        self, start_fake: StartFake, start_gateway: StartGateway
    ) -> None:
        fake = start_fake(["Hello."], settings=FakeSettings(latency_first_s=2.0))
        _, client = start_gateway(fake.url, "--keepalive-s", "0.2").session()
        with client.responses.stream(model="policy", input="Hi") as stream:
            kinds = [event.type for event in stream]
            assert stream.get_final_response().output_text == "Hello."
        assert kinds.count("response.in_progress") > 2

    def test_the_plain_v1_and_the_path_without_it_answer_too(self, gate: Gate) -> None:
        gateway = gate.says(["Hello."])
        created, _ = gateway.session()
        bare = openai.OpenAI(base_url=f"{gateway.url}/s/{created.api_key}", api_key="x")
        plain = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=created.api_key)
        for client in (bare, plain):
            assert client.responses.create(model="policy", input="Hi").output_text == "Hello."


@pytest.mark.engine
def test_real_vllm_answers_two_turns_spliced(smollm_engine: RealEngine, tmp_path: Path) -> None:
    with GatewayProcess(smollm_engine.url, tmp_path / "store") as gateway:
        created, client = gateway.session()
        items: list[Any] = [user("Say a word.")]
        for _ in range(2):
            answer, _ = streamed(client, input=items, max_output_tokens=8)
            items += [*echoed(answer.output), user("Another.")]
        assert [turn.kind for turn in turns_of(gateway, created.id)] == ["first", "spliced"]
        assert json.dumps(items)
