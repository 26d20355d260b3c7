"""A client that disconnects cancels its generation in the engine, seen in the engine's own metrics.

At once here (`reattach_s` is 0): how a turn outlives its client for a while is in test_retries.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engines import RealEngine
from tests.fake_engine.settings import FakeSettings
from tests.gateway_process import GatewayProcess
from tests.proxy.conftest import StartFake, StartGateway
from turngate.proxy.engine.wire import parse_load

AT_ONCE = ("--reattach-s", "0")


def running(url: str) -> int:
    return parse_load(httpx.get(f"{url}/metrics").text).running


def wait_for(condition: Any, limit_s: float = 30) -> bool:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def leave_midway(base_url: str, stream: bool, started: Any) -> None:
    """Ask for a long answer and hang up once it is being generated."""
    body = {"messages": [{"role": "user", "content": "Tell a long story."}], "stream": stream, "max_tokens": 400}
    with httpx.Client(timeout=60) as client:
        if stream:
            with client.stream("POST", f"{base_url}/chat/completions", json=body) as answer:
                next(answer.iter_bytes())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(f"{base_url}/chat/completions", json=body, timeout=httpx.Timeout(60, read=3))
    assert started()


@pytest.mark.engine
@pytest.mark.parametrize("stream", [True, False])
def test_the_real_engine_stops_generating(smollm_engine: RealEngine, tmp_path: Path, stream: bool) -> None:
    with GatewayProcess(smollm_engine.url, tmp_path / "store", *AT_ONCE) as gateway:
        created, _ = gateway.session(sampling={"min_tokens": 390})
        before = running(smollm_engine.url)
        leave_midway(created.base_url, stream, lambda: True)
        assert wait_for(lambda: running(smollm_engine.url) <= before)
        assert wait_for(lambda: "turngate_cancelled_total 1" in httpx.get(f"{gateway.url}/metrics").text)
        assert gateway.client.rollout(created.id).turns == 0


@pytest.mark.parametrize("stream", [True, False])
def test_the_fake_engine_sees_the_abort(start_fake: StartFake, start_gateway: StartGateway, stream: bool) -> None:
    fake = start_fake(None, settings=FakeSettings(tokens_per_s=20.0))
    gateway = start_gateway(fake.url, *AT_ONCE)
    created, _ = gateway.session()
    leave_midway(created.base_url, stream, lambda: fake.seen("/inference/v1/generate"))
    assert wait_for(lambda: fake.engine.aborted == 1)
