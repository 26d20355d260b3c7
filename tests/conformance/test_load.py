"""The engine's work: given up when nobody waits for it, spread and bounded."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.conformance.answers import Session, asked, chat
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
