"""A silent engine: every client gets signs of life that it takes for such, streamed or whole, in every dialect."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import product

import anthropic
import httpx2
import openai
import pytest

from tests.fake_engine.settings import FakeSettings, Fault
from tests.proxy.conftest import StartFake, StartGateway
from tests.proxy.sdks import SDKS, Said
from turngate.proxy import wire

SILENT_S, IDLE_S = 7.0, 4.0
"""How long the engine says nothing, and how long a client waits for something; between signs it is 0.3 s."""


def test_no_sdk_times_out_before_or_within_an_answer(start_fake: StartFake, start_gateway: StartGateway) -> None:
    # Two tokens: one after the silence, the end after as much again.
    slow = FakeSettings(latency_first_s=SILENT_S, tokens_per_s=1 / SILENT_S, intervals=False)
    gateway = start_gateway(start_fake(["Hello"], settings=slow).url, "--keepalive-s", "0.3")

    def said(way: tuple[str, bool]) -> Said:
        created, _ = gateway.session()
        return SDKS[way[0]][0](created, "Hi", stream=way[1], idle_s=IDLE_S)

    ways = list(product(SDKS, [False, True]))
    with ThreadPoolExecutor(len(ways)) as pool:
        answers = list(pool.map(said, ways))
    assert answers == [("Hello", SDKS[dialect][1]) for dialect, _ in ways]


def test_without_signs_of_life_every_sdk_does_time_out(start_fake: StartFake, start_gateway: StartGateway) -> None:
    slow = FakeSettings(latency_first_s=3.0)
    gateway = start_gateway(start_fake(["Hello"], settings=slow).url, "--keepalive-s", "60")

    def left(way: tuple[str, bool]) -> bool:
        created, _ = gateway.session()
        try:
            SDKS[way[0]][0](created, "Hi", stream=way[1], idle_s=1.0)
        except (openai.APITimeoutError, anthropic.APITimeoutError, httpx2.TimeoutException):
            return True
        return False

    ways = list(product(SDKS, [False, True]))
    with ThreadPoolExecutor(len(ways)) as pool:
        assert list(pool.map(left, ways)) == [True] * len(ways)


def test_a_whole_answer_that_fails_after_its_blanks_is_a_broken_connection_which_sdks_ask_again_after(
    start_fake: StartFake, start_gateway: StartGateway
) -> None:
    fake = start_fake(["Hello."], settings=FakeSettings(latency_first_s=1.0))
    gateway = start_gateway(fake.url, "--keepalive-s", "0.2", "--failover-wait-s", "0.1")
    created, client = gateway.session()
    fake.fail(Fault("error", after_tokens=0, times=-1))
    with pytest.raises(openai.APIConnectionError):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hi"}])
    fake.fail(None)
    answer = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hi"}])
    assert answer.choices[0].message.content == "Hello."
    finished = gateway.client.finish_rollout(created.id, wire.FinishRollout(reward=1.0))
    assert (finished.outcome, finished.cause, finished.turns) == ("unscorable", "engine_fault", 1)
