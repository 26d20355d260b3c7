"""Looking at a gateway process from outside: its gauges, and whether it is at rest."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx

from tests.gateway_process import GatewayProcess
from turngate.proxy import wire


def wait_for(condition: Callable[[], object], limit_s: float = 60) -> bool:
    """Whether `condition` became true within `limit_s`."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True


def gauge(gateway: GatewayProcess, name: str) -> float:
    """A value of its `/metrics`."""
    lines = httpx.get(f"{gateway.url}/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith(name + " ")).split()[1])


def at_rest(gateway: GatewayProcess) -> bool:
    """No turn and no request of an agent is under way (any more)."""
    names = ("turngate_turns_in_flight",)
    return wait_for(lambda: all(gauge(gateway, name) == 0 for name in names))


def refuses_what_exceeds_limits(gateway: GatewayProcess, prefix: str, *, max_body_bytes: int) -> None:
    """Every limit of the door, and every state of a session, on one way to a turn; `{secret}` in `prefix` is filled."""
    created, _ = gateway.session()
    url = f"{gateway.url}{prefix.format(secret=created.api_key)}/chat/completions"
    key = {"authorization": f"Bearer {created.api_key}"}
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    wanted: dict[int, dict[str, object]] = {
        421: {"headers": {**key, "host": "evil.example"}, "json": body},
        413: {"headers": key, "content": b"x" * (max_body_bytes + 1)},
        431: {"headers": {**key, "x": "y" * 100_000}, "json": body},
        400: {"headers": key, "content": b"{"},
        200: {"headers": key, "json": body},
    }
    assert [httpx.post(url, **one).status_code for one in wanted.values()] == list(wanted)  # type: ignore[arg-type]
    gateway.client.finish_rollout(created.id, wire.FinishRollout(outcome="cancelled", cause="test_over"))
    assert httpx.post(url, headers=key, json=body).status_code == 410
