"""Looking at a gateway process from outside: its gauges, and whether it is at rest."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx

from tests.gateway_process import GatewayProcess


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
