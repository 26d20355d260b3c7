"""Agents before several engines, some of which die, are full or are gone: one answer, or an honest error."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.fake_engine import FakeSettings, Fault
from tests.gateway_process import GatewayProcess
from tests.proxy.conftest import StartFake, StartGateway
from turngate.proxy import wire
from turngate.proxy.rows import build_rows
from turngate.proxy.store.turnstore import TurnStore
from turngate.proxy.turns import Turn

WORDS = "one two three four five six seven eight nine ten eleven twelve"
SLOW = FakeSettings(tokens_per_s=20.0)
HI: list[Any] = [{"role": "user", "content": "Hi"}]


def streamed(client: openai.OpenAI, **more: Any) -> tuple[str, str | None]:
    text, finish = "", None
    for event in client.chat.completions.create(model="m", messages=HI, stream=True, **more):
        for choice in event.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    return text, finish


def turns_of(gateway: GatewayProcess, rollout: str) -> list[Turn]:
    with TurnStore(gateway.store / "turns-0.sqlite", readonly=True) as store:
        return store.turns(rollout)


def metric(gateway: GatewayProcess, name: str) -> float:
    lines = httpx.get(f"{gateway.url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def verified(gateway: GatewayProcess) -> bool:
    command = [sys.executable, "-m", "turngate.proxy.cli", "verify", str(gateway.store)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_an_engine_that_dies_mid_stream_is_not_seen_by_the_agent(
    start_fake: StartFake, start_gateway: StartGateway
) -> None:
    fakes = [start_fake([WORDS], settings=SLOW) for _ in range(2)]
    gateway = start_gateway(fakes[0].url, "--engine", fakes[1].url)
    created, client = gateway.session()

    def kill() -> None:
        while not fakes[0].engine.running:
            time.sleep(0.01)
        time.sleep(0.2)
        fakes[0].stop()

    killer = threading.Thread(target=kill)
    killer.start()
    assert streamed(client) == (WORDS, "stop")
    killer.join()
    (turn,) = turns_of(gateway, created.id)
    assert [span.engine for span in turn.spans] == ["engine-0", "engine-1"]
    assert turn.spans[0].end == turn.spans[1].start > 0
    assert turn.spans[1].end == len(turn.completion_ids) == len(turn.logprobs)
    assert (turn.engine, turn.flags) == ("engine-1", ("continued",))
    (row,) = build_rows([turn])
    assert row.mask.sum() == len(turn.completion_ids)
    assert metric(gateway, 'turngate_continuations_total{engine="engine-0"}') == 1
    assert metric(gateway, 'turngate_engine_up{engine="engine-0"}') == 0
    assert metric(gateway, 'turngate_engine_up{engine="engine-1"}') == 1
    info = gateway.client.finish_rollout(created.id, wire.FinishRollout(reward=1.0))
    assert (info.outcome, info.reward) == ("scored", 1.0)
    assert verified(gateway)


@pytest.mark.parametrize("stream", [False, True])
def test_without_any_engine_the_agent_gets_an_error_and_the_rollout_no_score(
    stream: bool, start_fake: StartFake, start_gateway: StartGateway
) -> None:
    fake = start_fake([WORDS])
    gateway = start_gateway(fake.url, "--failover-wait-s", "0.3")
    created, client = gateway.session()
    assert client.chat.completions.create(model="m", messages=HI).choices[0].finish_reason == "stop"
    fake.stop()
    with pytest.raises(openai.InternalServerError) as refused:
        client.chat.completions.create(model="m", messages=HI, stream=stream)
    assert refused.value.status_code == 503
    assert str(fake.port) not in refused.value.message
    assert "127.0.0.1" not in refused.value.message
    assert f"127.0.0.1:{fake.port}" in gateway.log.read_text()
    for _ in range(2):
        info = gateway.client.finish_rollout(created.id, wire.FinishRollout(reward=1.0))
        assert (info.outcome, info.cause, info.reward) == ("unscorable", "engine_fault", None)
        assert info.metrics["flags"] == ["engine_fault"]
    with pytest.raises(Exception, match="was finished as unscorable"):
        gateway.client.finish_rollout(created.id, wire.FinishRollout(reward=0.5))


@pytest.mark.parametrize("kind", ["error", "drop", "abort", "cut", "refuse"])
def test_no_error_says_where_an_engine_is(kind: Any, start_fake: StartFake, start_gateway: StartGateway) -> None:
    fake = start_fake([WORDS])
    gateway = start_gateway(fake.url)
    _, client = gateway.session()
    fake.fail(Fault(kind, after_tokens=0, times=-1))
    with pytest.raises(openai.APIStatusError) as refused:
        client.chat.completions.create(model="m", messages=HI)
    assert str(fake.port) not in str(refused.value.body)
    assert "engine-0" in str(refused.value.body)


def test_a_penalty_on_output_is_an_honest_fault(start_fake: StartFake, start_gateway: StartGateway) -> None:
    fake = start_fake([WORDS])
    gateway = start_gateway(fake.url)
    created, client = gateway.session(sampling={"presence_penalty": 0.5})
    fake.fail(Fault("error", after_tokens=3))
    with pytest.raises(openai.APIError, match="presence_penalty"):
        streamed(client)
    info = gateway.client.finish_rollout(created.id, wire.FinishRollout(reward=1.0))
    assert (info.turns, info.outcome, info.cause) == (0, "unscorable", "engine_fault")


def test_transparent_turns_change_the_engine_before_their_first_token_only(
    start_fake: StartFake, start_gateway: StartGateway
) -> None:
    fakes = [start_fake([WORDS], settings=FakeSettings(exact=False)) for _ in range(2)]
    gateway = start_gateway(fakes[0].url, "--engine", fakes[1].url)
    created, client = gateway.session()
    fakes[0].fail(Fault("refuse"))
    assert streamed(client) == (WORDS, "stop")
    (turn,) = turns_of(gateway, created.id)
    assert (turn.mode, turn.engine) == ("transparent", "engine-1")
    fakes[1].fail(Fault("error", after_tokens=3))
    with pytest.raises(openai.APIError) as broken:
        streamed(client)
    assert str(fakes[1].port) not in str(broken.value)
    info = gateway.client.finish_rollout(created.id, wire.FinishRollout(reward=1.0))
    assert (info.turns, info.cause) == (1, "engine_fault")


def test_a_full_engine_refuses_with_429_or_makes_turns_wait(start_fake: StartFake, start_gateway: StartGateway) -> None:
    fake = start_fake([WORDS])
    full = ("--admission-queue", "2", "--admission-kv-usage", "0.9")
    refusing = start_gateway(fake.url, *full, "--admission", "refuse", store="refusing")
    waiting = start_gateway(fake.url, *full, store="waiting")
    fake.engine.waiting, fake.engine.kv_usage = 7, 0.5
    for gateway in (refusing, waiting):
        while metric(gateway, "turngate_engine_waiting_requests") != 7:
            time.sleep(0.05)
    created, client = refusing.session()
    with pytest.raises(openai.RateLimitError, match="engine-0") as refused:
        client.chat.completions.create(model="m", messages=HI)
    assert refused.value.code == "engines_full"
    assert metric(refusing, "turngate_admission_refusals_total") == 1
    fake.engine.waiting, fake.engine.kv_usage = 1, 0.95  # a short queue, but no memory left
    while metric(refusing, "turngate_engine_kv_usage") != 0.95:
        time.sleep(0.05)
    with pytest.raises(openai.RateLimitError, match="engine-0"):
        client.chat.completions.create(model="m", messages=HI)
    fake.engine.waiting, fake.engine.kv_usage = 7, 0.5
    while metric(waiting, "turngate_engine_waiting_requests") != 7:
        time.sleep(0.05)
    assert refusing.client.finish_rollout(created.id, wire.FinishRollout(reward=1.0)).outcome == "scored"

    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(streamed(waiting.session()[1])))
    asking.start()
    while metric(waiting, "turngate_engine_queued_turns") != 1:
        time.sleep(0.05)
    assert answers == []
    fake.engine.waiting = 0
    asking.join(timeout=60)
    assert answers == [(WORDS, "stop")]
    assert metric(waiting, "turngate_admission_waits_total") == 1
    assert metric(waiting, "turngate_engine_kv_usage") == 0.5
    assert metric(refusing, "turngate_admission_refusals_total") == 2


def test_an_unknown_policy_cannot_be_leased_from(start_fake: StartFake, start_gateway: StartGateway) -> None:
    gateway = start_gateway(start_fake([WORDS]).url)
    key = Path(gateway.store / "admin.key").read_text().strip()
    answer = httpx.post(f"{gateway.url}/leases", json={"policy": "another"}, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 404
    assert "known: policy" in answer.json()["error"]["message"]
