"""One exposed port: the main port relays to the worker that a secret names, streams, and cancels with its client."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import openai
import pytest

from tests.fake_engine.settings import FakeSettings
from tests.proxy.anthropic_client import asking
from tests.proxy.anthropic_client import say as said
from tests.proxy.anthropic_client import session as anthropic_session
from tests.proxy.conftest import Gate
from tests.proxy.probing import refuses_what_exceeds_limits
from tests.proxy.test_client_leaves import leave_midway
from tests.proxy.test_faults import BODY, wait_for
from tests.proxy.workers.fleets import kill_worker, worker_pids
from turngate.proxy import wire
from turngate.proxy.app import build_app
from turngate.proxy.settings import GatewaySettings

LONG = ["word " * 400]


def test_every_session_is_reached_through_the_main_port(front: Gate) -> None:
    gateway = front.says(["Fine, thanks."])
    created = [gateway.session() for _ in range(2)]
    for one, client in created:
        assert one.base_url.startswith(f"{gateway.url}/s/tg-w")
        assert client.chat.completions.create(model="m", messages=BODY["messages"]).choices[0].message.content
        headers = {"authorization": f"Bearer {one.api_key}"}
        assert httpx.post(f"{gateway.url}/v1/chat/completions", json=BODY, headers=headers).status_code == 200
        headers = {"x-api-key": one.api_key}
        assert httpx.get(f"{gateway.url}/v1/models", headers=headers).json()["data"][0]["id"] == "policy"
        assert gateway.client.rollout(one.id).turns == 2
    unknown = [f"{gateway.url}/s/tg-w{worker}-{'0' * 48}/v1/chat/completions" for worker in (0, 1, 7)]
    assert [httpx.post(url, json=BODY).status_code for url in unknown] == [404, 404, 404]
    assert httpx.post(f"{gateway.url}/v1/chat/completions", json=BODY).status_code == 401
    too_large = {"messages": [{"role": "user", "content": "x" * 20_001}]}
    assert httpx.post(f"{created[0][0].base_url}/chat/completions", json=too_large).status_code == 413
    gateway.client.finish_rollout(created[0][0].id, wire.FinishRollout(reward=1.0))
    assert httpx.post(f"{created[0][0].base_url}/chat/completions", json=BODY).status_code == 410


def test_responses_are_relayed_whole_and_streamed(front: Gate) -> None:
    created, client = front.says(["Fine, thanks."]).session()
    plain = openai.OpenAI(base_url=f"{front.gateway.url}/v1", api_key=created.api_key)
    bare = openai.OpenAI(base_url=created.base_url.removesuffix("/v1"), api_key="x")
    for one in (client, plain, bare):
        assert one.responses.create(model="m", input="Hi").output_text == "Fine, thanks."
        *_, last = one.responses.create(model="m", input="Hi", stream=True)
        assert last.type == "response.completed"
    assert front.gateway.client.rollout(created.id).turns == 6


def test_anthropics_messages_are_relayed_counted_and_refused_in_their_own_form(front: Gate) -> None:
    created, client = anthropic_session(front.says(["Fine, thanks."]))
    for stream in (False, True):
        message = said(client, stream=stream, **asking("Hi"))
        assert message.content[0].text == "Fine, thanks."
    counted = client.messages.count_tokens(model="m", messages=[{"role": "user", "content": "Hi"}])
    assert counted.input_tokens == message.usage.input_tokens
    refused = [
        httpx.post(f"{front.gateway.url}/v1/messages", json=asking("Hi")),
        httpx.post(f"{front.gateway.url}/s/tg-w7-{'0' * 48}/v1/messages", json=asking("Hi")),
        httpx.post(f"{front.gateway.url}/v1/messages", json=asking("Hi"), headers={"host": "evil.example"}),
    ]
    assert [answer.status_code for answer in refused] == [401, 404, 421]
    assert {answer.json()["type"] for answer in refused} == {"error"}
    assert front.gateway.client.rollout(created.id).turns == 2


def test_googles_paths_and_keys_are_relayed_too(front: Gate) -> None:
    created, _ = front.says(["Fine, thanks."]).session()
    body, root = {"contents": [{"parts": [{"text": "Hi"}]}]}, front.gateway.url
    for url, key in ((f"{root}/v1beta", "header"), (f"{root}/v1beta", "query"), (created.base_url, "path")):
        headers = {"x-goog-api-key": created.api_key} if key == "header" else {}
        params = {"key": created.api_key} if key == "query" else {}
        answer = httpx.post(f"{url}/models/m:generateContent", json=body, headers=headers, params=params, timeout=60)
        assert answer.json()["candidates"][0]["content"]["parts"] == [{"text": "Fine, thanks."}]
    assert front.gateway.client.rollout(created.id).turns == 3
    assert created.api_key not in front.gateway.log.read_text()


def test_a_relayed_answer_streams_while_it_is_sampled(front: Gate) -> None:
    fake, gateway = front.fake, front.says(["one two three four five six seven eight"])
    fake.engine.settings = FakeSettings(tokens_per_s=4.0)
    created, _ = gateway.session()
    seen: list[bool] = []
    with httpx.stream("POST", f"{created.base_url}/chat/completions", json={**BODY, "stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                seen.append(bool(fake.engine.running))
    assert seen[0], "the first content came while the engine was sampling"
    assert len(seen) > 1


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_the_main_port_cancels_in_the_engine(front: Gate, stream: bool) -> None:
    fake, gateway = front.fake, front.says(LONG)
    fake.engine.settings = FakeSettings(tokens_per_s=20.0)
    created, _ = gateway.session()
    aborted = fake.engine.aborted
    leave_midway(created.base_url, stream, lambda: fake.seen("/inference/v1/generate"))
    assert wait_for(lambda: fake.engine.aborted == aborted + 1)
    assert gateway.client.rollout(created.id).turns == 0


def test_an_answer_whose_worker_dies_is_refused_or_broken_never_taken_for_whole(front: Gate) -> None:
    fake, gateway = front.fake, front.says(LONG)
    fake.engine.settings = FakeSettings(tokens_per_s=20.0)
    created, _ = gateway.session()
    url, first = f"{created.base_url}/chat/completions", worker_pids(gateway)[0]
    with httpx.stream("POST", url, json={**BODY, "stream": True}, timeout=60) as answer:
        lines = answer.iter_lines()
        assert next(lines)
        kill_worker(gateway, first)
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)
    fake.engine.settings = FakeSettings()
    assert httpx.post(url, json={**BODY, "max_tokens": 5}, timeout=60).status_code == 200


def test_the_main_port_describes_what_it_relays(front: Gate) -> None:
    """Fuzzers and generators of clients see the same API, however many processes serve it."""
    alone = build_app(GatewaySettings(engines=["http://engine"], store=Path("store"))).openapi()
    told = httpx.get(f"{front.gateway.url}/openapi.json").json()
    assert told["paths"].keys() == alone["paths"].keys()
    assert told == json.loads(json.dumps(alone))


@pytest.mark.parametrize("prefix", ["/s/{secret}/v1", "/s/{secret}", "/v1"])
def test_every_way_to_a_turn_has_the_same_limits(front: Gate, prefix: str) -> None:
    """The short way before the framework, the routes, and the relay: none goes round the door."""
    refuses_what_exceeds_limits(front.says(["Hello."]), prefix, max_body_bytes=20_000)
