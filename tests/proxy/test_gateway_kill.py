"""`kill -9` of the gateway in the middle of load: no turn whose answer a client received in full is lost."""

from __future__ import annotations

import threading
import time
from typing import Any

import httpx

from tests.fake_engine.settings import FakeSettings
from tests.proxy.conftest import StartFake, StartGateway
from turngate.proxy.store.layout import StoreFolder
from turngate.proxy.store.turnstore import TurnStore
from turngate.proxy.verify import verify_store

KILLS = 20


class Agent(threading.Thread):
    """An agent that keeps asking, and remembers which answers it received to the last byte."""

    def __init__(self, base_url: str, stop: threading.Event, *, stream: bool) -> None:
        super().__init__(daemon=True)
        self._url, self._ended, self._stream = f"{base_url}/chat/completions", stop, stream
        self.received: list[str] = []
        self.faults: list[str] = []

    def run(self) -> None:
        messages: list[Any] = [{"role": "user", "content": "Go"}]
        with httpx.Client(timeout=30) as client:
            while not self._ended.is_set():
                try:
                    answer = client.post(self._url, json={"messages": messages[-6:], "stream": self._stream})
                except httpx.HTTPError:
                    time.sleep(0.05)
                    continue
                if answer.status_code != 200:
                    self.faults.append(answer.text)
                    time.sleep(0.05)
                elif self._stream and answer.text.endswith("data: [DONE]\n\n"):
                    self.received.append(answer.text.split('"id":"chatcmpl-')[1].split('"')[0])
                elif not self._stream:
                    self.received.append(answer.json()["id"].removeprefix("chatcmpl-"))
                messages.append({"role": "user", "content": "More"})


def test_twenty_kills_lose_no_answer_that_a_client_has(start_fake: StartFake, start_gateway: StartGateway) -> None:
    fake = start_fake(["Some words of an answer."], settings=FakeSettings(tokens_per_s=400.0))
    gateway = start_gateway(fake.url)
    stop = threading.Event()
    agents = [Agent(gateway.session()[0].base_url, stop, stream=i % 2 == 0) for i in range(6)]
    for agent in agents:
        agent.start()
    for kill in range(KILLS):
        before = sum(len(agent.received) for agent in agents)
        deadline = time.monotonic() + 30
        while sum(len(agent.received) for agent in agents) < before + 5 and time.monotonic() < deadline:
            time.sleep(0.01 * (kill % 4 + 1))
        gateway.kill()
        gateway.start()
    stop.set()
    for agent in agents:
        agent.join(timeout=60)
    gateway.stop()
    received = {turn for agent in agents for turn in agent.received}
    with TurnStore(StoreFolder.find(gateway.store).turns(0), readonly=True) as store:
        stored = {turn.id for rollout in store.rollouts() for turn in store.turns(rollout)}
    assert len(received) >= KILLS * 5
    assert received <= stored
    assert verify_store(gateway.store).problems == []
