"""A storm of wrong bodies and wrong requests: never a 500, nothing left behind, no acknowledged turn lost.

The gateway is a real process. Its limits are so low that a request, turn or connection that stayed behind would be
refused to the next. `make test-long` storms for longer.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import orjson
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fake_engine.runner import FakeEngine
from tests.fake_engine.settings import FakeSettings
from tests.gateway_process import GatewayProcess
from tests.proxy.probing import at_rest, gauge, wait_for
from tests.proxy.storm import MARK, WIRES, Wire, chunked, exchange, requests, spoilt
from turngate.proxy.exchange import TERMINAL_TEXT
from turngate.proxy.store.reader import StoreReader
from turngate.proxy.verify import verify_store

EXAMPLES = int(os.environ.get("TURNGATE_STORM_EXAMPLES", "120"))
LONG = 4000
ENDED = re.compile("|".join(map(re.escape, TERMINAL_TEXT.values())).encode())
"""A run that the gateway ended itself (a full context): nothing was sampled, so there is no turn."""

SMALL = b'{"messages": [{"role": "user", "content": "Hi"}]}'
STATUS = re.compile(rb"HTTP/1\.1 (\d{3})")
EXPECTED = {100, 200, 400, 401, 404, 405, 408, 410, 413, 421, 429, 431}
LIMITS = ("--max-session-concurrency", "2", "--max-concurrency", "2", "--max-body-bytes", "2000000")
QUICK = ("--request-timeout-s", "2", "--max-header-bytes", "4000", "--max-connections", "50", "--reattach-s", "0.2")


@dataclass
class Storm:
    """A gateway, one session of it, how it was before, and the turns that it acknowledged."""

    fake: FakeEngine
    gateway: GatewayProcess
    base: str
    rollout: str
    tasks: float
    descriptors: float
    kept: list[str] = field(default_factory=list)

    @property
    def target(self) -> str:
        """The path of the session's base URL."""
        return self.base.removeprefix(self.gateway.url)


@pytest.fixture(scope="module")
def storm(model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Storm]:
    """One gateway for all storms, warm."""
    with (
        FakeEngine(model_dir("qwen-coder-0.5b"), ["Hello."]) as fake,
        GatewayProcess(fake.url, tmp_path_factory.mktemp("storm") / "store", *LIMITS, *QUICK) as gateway,
    ):
        created, _ = gateway.session()
        httpx.post(f"{created.base_url}/chat/completions", content=SMALL).raise_for_status()
        assert at_rest(gateway)
        tasks, descriptors = gauge(gateway, "turngate_tasks"), gauge(gateway, "process_open_fds")
        yield Storm(fake, gateway, created.base_url, created.id, tasks, descriptors)


def storming(examples: int) -> Callable[..., Callable[..., None]]:
    """Settings of a storm: repeatable, no shrinking (the gateway's state is part of it)."""
    return settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def send_bodies(storm: Storm, wire: Wire, examples: int) -> None:
    """Spoilt bodies, each with an answer that fits."""
    with httpx.Client(timeout=60) as http:

        @storming(examples)
        @given(made=spoilt(wire))
        def run(made: tuple[bytes, dict[str, str]]) -> None:
            raw, headers = made
            answer = http.post(f"{storm.base}{wire.path}", content=raw, headers=headers)
            assert answer.status_code in (200, 400, 413, 415), (raw[:2000], headers, answer.text)
            if answer.status_code == 200:
                turn = wire.turn_of(answer.content)
                assert turn is not None, (raw[:2000], answer.text)
                if not ENDED.search(answer.content):
                    storm.kept.append(turn)
            else:
                assert len(answer.json()["error"]["message"]) > 10

        run()


def send_requests(storm: Storm, wire: Wire, examples: int) -> None:
    """Spoilt requests, each with answers that are none of a failure."""

    @storming(examples)
    @given(data=requests(f"{storm.target}{wire.path}", SMALL), pieces=st.sampled_from([1, 1, 2, 7]))
    def run(data: bytes, pieces: int) -> None:
        answer = exchange(storm.gateway.port, data, wait_s=0.05, pieces=pieces)
        found = {int(status) for status in STATUS.findall(answer)}
        assert found <= EXPECTED, (data, answer)

    run()


def calm(storm: Storm) -> None:
    """Everything is as it was, and what was acknowledged is there."""
    gateway = storm.gateway
    assert at_rest(gateway)
    assert wait_for(lambda: gauge(gateway, "turngate_tasks") <= storm.tasks), gauge(gateway, "turngate_tasks")
    assert wait_for(lambda: gauge(gateway, "process_open_fds") <= storm.descriptors)
    assert wait_for(lambda: not storm.fake.engine.running)
    storm.fake.engine.settings = FakeSettings(tokens_per_s=5.0)
    try:
        with ThreadPoolExecutor(2) as pool:  # as many as the limits allow: nothing of before counts as in flight
            ask = lambda _: httpx.post(f"{storm.base}/chat/completions", content=SMALL, timeout=60)  # noqa: E731
            answers = list(pool.map(ask, range(2)))
    finally:
        storm.fake.engine.settings = FakeSettings()
    assert [answer.status_code for answer in answers] == [200, 200]
    with StoreReader(gateway.store) as reader:
        assert set(storm.kept) <= {turn.id for turn in reader.turns(storm.rollout)}
    assert verify_store(gateway.store).problems == []
    log = gateway.log.read_text()
    assert not [line for line in log.splitlines() if '"level":"error"' in line or "Traceback" in line]


@pytest.mark.parametrize("name", WIRES)
def test_no_body_is_a_failure(storm: Storm, name: str) -> None:
    before = len(storm.kept)
    send_bodies(storm, WIRES[name], EXAMPLES)
    assert len(storm.kept) - before > EXAMPLES // 20, "too few bodies were odd and right"
    calm(storm)


@pytest.mark.parametrize("name", WIRES)
def test_no_bytes_on_a_connection_are_a_failure(storm: Storm, name: str) -> None:
    send_requests(storm, WIRES[name], EXAMPLES)
    calm(storm)


@pytest.mark.long
@pytest.mark.parametrize("name", WIRES)
def test_a_long_storm(storm: Storm, name: str) -> None:
    send_bodies(storm, WIRES[name], LONG)
    send_requests(storm, WIRES[name], LONG)
    calm(storm)


LENGTH = b"content-length: %d" % len(SMALL)
AMBIGUOUS = {
    "both framings": (LENGTH + b"\r\ntransfer-encoding: chunked", chunked(SMALL, 9)),
    "both framings, the other way": (b"transfer-encoding: chunked\r\n" + LENGTH, chunked(SMALL, 9)),
    "two lengths": (LENGTH + b"\r\ncontent-length: 5", SMALL),
    "a list of lengths": (b"content-length: 5, 5", SMALL),
    "a signed length": (b"content-length: +49", SMALL),
    "a negative length": (b"content-length: -1", SMALL),
    "a length in hex": (b"content-length: 0x31", SMALL),
    "a length without end": (b"content-length: " + b"9" * 40, SMALL),
    "an unknown coding": (b"transfer-encoding: xchunked", chunked(SMALL, 9)),
    "chunked is not last": (b"transfer-encoding: chunked, identity", chunked(SMALL, 9)),
    "a chunk that is no number": (b"transfer-encoding: chunked", b"zz\r\n" + SMALL),
    "a negative chunk": (b"transfer-encoding: chunked", b"-5\r\n" + SMALL),
    "a chunk without end": (b"transfer-encoding: chunked", b"f" * 40 + b"\r\n" + SMALL),
    "a chunk longer than it says": (b"transfer-encoding: chunked", b"5\r\n" + SMALL),
    "a space before the colon": (b"content-length : 49", SMALL),
    "a folded header": (b"x: 1\r\n content-length: 5\r\n" + LENGTH, SMALL),
    "a zero byte": (b"x: a\x00b\r\n" + LENGTH, SMALL),
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_a_request_whose_end_is_not_certain_is_refused_and_nothing_behind_it_is_read(storm: Storm, name: str) -> None:
    framing, body = AMBIGUOUS[name]
    head = f"POST {storm.target}/chat/completions HTTP/1.1\r\nhost: localhost\r\n".encode()
    answer = exchange(storm.gateway.port, head + framing + b"\r\n\r\n" + body + MARK, wait_s=30)
    assert STATUS.findall(answer) == [b"400"], answer
    assert b"smuggled" not in answer


def test_requests_behind_one_another_are_answered_in_order(storm: Storm) -> None:
    turn = f"POST {storm.target}/chat/completions HTTP/1.1\r\nhost: localhost\r\n".encode()
    whole = turn + LENGTH + b"\r\n\r\n" + SMALL
    pieces = turn + b"transfer-encoding: chunked\r\n\r\n" + chunked(SMALL, 9)
    last = MARK.replace(b"host:", b"connection: close\r\nhost:")
    answer = exchange(storm.gateway.port, whole + pieces + last, wait_s=30)
    assert STATUS.findall(answer) == [b"200", b"200", b"404"], answer
    kept = {orjson.loads(one)["id"] for one in re.findall(rb'\{"id":"chatcmpl-.*?"total_tokens":\d+\}\}', answer)}
    assert len(kept) == 2
    calm(storm)
