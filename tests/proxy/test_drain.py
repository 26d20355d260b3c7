"""SIGTERM drains: turns in flight reach their agents and the store, new ones are refused, a second one ends it."""

from __future__ import annotations

import re
import signal
import subprocess
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest

from tests.fake_engine.settings import FakeSettings
from tests.gateway_process import GatewayProcess
from tests.proxy.conftest import StartFake, StartGateway
from tests.proxy.test_faults import BODY, wait_for
from turngate.proxy.store.reader import StoreReader

HELD = FakeSettings(tokens_per_s=8.0)
ENDLESS = FakeSettings(tokens_per_s=0.5)
WORDS = "one two three four five six seven eight nine ten eleven twelve"


def ask(url: str) -> httpx.Response:
    return httpx.post(f"{url}/chat/completions", json=BODY, timeout=120)


def in_flight(gateway: GatewayProcess) -> bool:
    text = httpx.get(f"{gateway.url}/metrics").text
    return re.search(r"^turngate_turns_in_flight(\{.*\})? 1$", text, re.MULTILINE) is not None


def ended(gateway: GatewayProcess) -> int | None:
    assert gateway.process is not None
    try:
        return gateway.process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        return None


def terminate(gateway: GatewayProcess, number: signal.Signals = signal.SIGTERM) -> None:
    assert gateway.process is not None
    gateway.process.send_signal(number)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_turn_in_flight_is_finished_and_kept_while_new_ones_are_told_to_come_back(
    start_fake: StartFake, start_gateway: StartGateway, workers: str
) -> None:
    gateway = start_gateway(start_fake([WORDS], settings=HELD).url, "--drain-s", "60", "--workers", workers)
    created, _ = gateway.session()
    with ThreadPoolExecutor(1) as pool:
        first: Future[httpx.Response] = pool.submit(ask, created.base_url)
        assert wait_for(lambda: in_flight(gateway))
        terminate(gateway)
        refused = ask(created.base_url)
        ready = httpx.get(f"{gateway.url}/readyz")
        answer = first.result()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert int(refused.headers["retry-after"]) > 0
    assert (ready.status_code, ready.json()["missing"]) == (503, ["the gateway is ending (draining)"])
    assert answer.json()["choices"][0]["message"]["content"] == WORDS
    assert ended(gateway) == 0
    with StoreReader(gateway.store) as store:
        assert [turn.finish_reason for turn in store.turns(created.id)] == ["stop"]


def test_turns_that_outlast_the_limit_are_cut_and_said_so(start_fake: StartFake, start_gateway: StartGateway) -> None:
    gateway = start_gateway(start_fake([WORDS], settings=ENDLESS).url, "--drain-s", "0.3")
    created, _ = gateway.session()
    threading.Thread(target=_ask_in_vain, args=(created.base_url,), daemon=True).start()
    assert wait_for(lambda: in_flight(gateway))
    terminate(gateway)
    assert ended(gateway) == 0
    assert '"event":"turns_cut"' in gateway.log.read_text()


def test_a_second_signal_ends_it_at_once(start_fake: StartFake, start_gateway: StartGateway) -> None:
    gateway = start_gateway(start_fake([WORDS], settings=ENDLESS).url, "--drain-s", "600")
    created, _ = gateway.session()
    threading.Thread(target=_ask_in_vain, args=(created.base_url,), daemon=True).start()
    assert wait_for(lambda: in_flight(gateway))
    terminate(gateway)
    assert wait_for(lambda: '"event":"draining"' in gateway.log.read_text())
    terminate(gateway)
    assert ended(gateway) == 0


def test_an_idle_gateway_ends_at_once(start_fake: StartFake, start_gateway: StartGateway) -> None:
    gateway = start_gateway(start_fake(["Hi"]).url, "--drain-s", "600")
    terminate(gateway, signal.SIGINT)
    assert ended(gateway) == 130


def _ask_in_vain(url: str) -> None:
    try:
        ask(url)
    except httpx.HTTPError:
        return
