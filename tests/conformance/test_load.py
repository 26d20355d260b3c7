"""The engine's work: given up when nobody waits for it, spread and bounded."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.conformance.answers import Session, chat
from tests.conformance.engines import Engine
from tests.conformance.targets import Target
from tests.conformance.wanted import HI, Says, becomes

ENDLESS = "The tests are green, so the next thing is to read the other module. " * 130
FANNED = 6


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_upstream_left_running_after_client_left(target: Target, says: Says, engine: Engine, stream: bool) -> None:
    says([ENDLESS])
    engine.slowly()
    session = target.session()
    finished = engine.finished()
    with asked(session, {"messages": HI, "max_tokens": 4000, "stream": stream}):
        assert becomes(lambda: engine.running() > 0), "the engine never began"
    assert becomes(lambda: engine.running() == 0), "the engine works on"
    assert engine.finished() == finished, "the engine made the whole answer for nobody"


@contextmanager
def asked(session: Session, body: dict[str, Any]) -> Iterator[None]:
    """A request under way, whose client hangs up at the end of the block."""
    url = httpx.URL(session.url)
    data = json.dumps({"model": session.model, **body}).encode()
    headers = {**session.headers, "host": url.netloc.decode(), "content-type": "application/json"}
    lines = [f"POST {url.path}/chat/completions HTTP/1.1", f"content-length: {len(data)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    with socket.create_connection((url.host, url.port)) as client:
        client.sendall("\r\n".join([*lines, "", ""]).encode() + data)
        yield


def test_least_busy_routing_prefers_one_backend(target: Target, says: Says, engine: Engine) -> None:
    second = engine.second()
    sessions = target.spread([engine.relay.url, second.url])  # which may ask the model something, freely
    says(["Hello."])
    second.asked.clear()
    for session in sessions:
        assert chat(session, HI).status == 200
    shares = (len(engine.relay.asked), len(second.asked))
    assert min(shares) >= len(sessions) / 4, f"the engines got {shares[0]} and {shares[1]} of {len(sessions)} sessions"


def test_concurrency_not_bounded_when_agents_fan_out(target: Target, says: Says, engine: Engine) -> None:
    says(["Hello."])
    session = target.session(concurrency=2)
    engine.relay.most_open = 0
    engine.relay.hold()
    with ThreadPoolExecutor(FANNED) as pool:
        asked = [pool.submit(_until_served, session, number) for number in range(FANNED)]
        assert becomes(lambda: engine.relay.open == 2), f"{engine.relay.open} requests reached the engine"
        time.sleep(1.0)
        engine.relay.release()
        assert [one.result() for one in asked] == [200] * FANNED
    assert engine.relay.most_open == 2, f"{engine.relay.most_open} requests at once"


def _until_served(session: Session, number: int) -> int:
    """As SDKs do: wait and ask again where a server says 429."""
    for _ in range(200):
        status = chat(session, [*HI, {"role": "user", "content": f"Part {number}."}]).status
        if status != 429:
            return status
        time.sleep(0.1)
    return 429
