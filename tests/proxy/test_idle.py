"""Sessions whose runner is gone: closed after a long silence, not while anything is asked of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import openai
import pytest

from tests.fake_engine.settings import FakeSettings
from tests.gateway_process import GatewayProcess
from tests.proxy.conftest import StartFake, StartGateway
from turngate.proxy import wire

IDLE_S = 1.0
ASKED: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Go."}]}


def wait_for(seen: Callable[[], bool]) -> None:
    """Until `seen`, a minute at most."""
    deadline = time.monotonic() + 60
    while not seen():
        assert time.monotonic() < deadline, "not seen within a minute"
        time.sleep(0.05)


def state(gateway: GatewayProcess, rollout: str) -> tuple[str, str | None, str | None]:
    """State, outcome and cause of a rollout."""
    info = gateway.client.rollout(rollout)
    return info.state, info.outcome, info.cause


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_silent_session_ends_unscorable_and_one_with_a_turn_in_flight_does_not(
    start_fake: StartFake, start_gateway: StartGateway, workers: str
) -> None:
    slow = start_fake(["word " * 60], settings=FakeSettings(tokens_per_s=60 / (5 * IDLE_S)))
    gateway = start_gateway(slow.url, "--session-idle-s", str(IDLE_S), "--workers", workers)
    (silent, refused), (busy, client) = gateway.session(), gateway.session()
    answer = client.chat.completions.create(**ASKED)
    assert answer.choices[0].finish_reason == "stop"
    wait_for(lambda: state(gateway, silent.id)[0] == "finished")
    assert state(gateway, silent.id) == ("finished", "unscorable", "session_idle")
    with pytest.raises(openai.APIStatusError) as gone:
        refused.chat.completions.create(**ASKED)
    assert gone.value.status_code == 410
    wait_for(lambda: state(gateway, busy.id)[0] == "finished")
    assert gateway.client.rollout(busy.id).turns == 1
    assert gateway.client.status().open_rollouts == 0


def test_silence_counts_over_a_restart_and_a_group_is_settled_without_the_silent(
    start_fake: StartFake, start_gateway: StartGateway
) -> None:
    fake = start_fake(["Hello."])
    before = start_gateway(fake.url)
    sessions = [before.session(group="g", group_size=3) for _ in range(3)]
    for _, client in sessions:
        client.chat.completions.create(**ASKED)
    for created, _ in sessions[1:]:
        before.client.finish_rollout(created.id, wire.FinishRollout(reward=1.0))
    before.stop()
    gateway = start_gateway(fake.url, "--session-idle-s", str(IDLE_S))
    wait_for(lambda: gateway.client.status().open_rollouts == 0)
    assert state(gateway, sessions[0][0].id) == ("finished", "unscorable", "session_idle")
    assert gateway.client.status().groups["ready"] == 1


def test_an_attempt_of_a_group_with_a_deadline_leaves_its_place_to_another(
    start_fake: StartFake, start_gateway: StartGateway
) -> None:
    gateway = start_gateway(start_fake(["Hello."]).url, "--session-idle-s", str(IDLE_S))
    grouped: dict[str, Any] = {"group": "g", "group_size": 2, "group_deadline_s": 600.0}
    silent, _ = gateway.session(**grouped)
    wait_for(lambda: state(gateway, silent.id)[0] == "finished")
    assert gateway.client.rollout(silent.id).replaced
    for _ in range(2):
        again, client = gateway.session(**grouped)
        client.chat.completions.create(**ASKED)
        gateway.client.finish_rollout(again.id, wire.FinishRollout(reward=1.0))
    assert gateway.client.status().groups["ready"] == 1
