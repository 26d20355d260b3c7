"""The gateway's administration calls for asyncio, patient with a gateway that is briefly down.

A refusal is final; no answer, and 502 to 504, are tried again with growing pauses until the patience is spent.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TypeVar

from turngate.harnesses.errors import Fault
from turngate.proxy import wire
from turngate.proxy.client import GatewayClient, GatewayError

log = logging.getLogger("turngate.runner")

R = TypeVar("R")
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 5.0
TRANSIENT = frozenset({0, 502, 503, 504})


class PatientGateway:
    """Runs the synchronous client in threads; every method raises `Fault` only."""

    def __init__(self, client: GatewayClient, patience_s: float) -> None:
        self._client = client
        self._patience_s = patience_s
        self._waiting = False

    async def create(self, new: wire.NewRollout) -> wire.RolloutCreated:
        """See `GatewayClient.create_rollout`."""
        return await self._call(lambda: self._client.create_rollout(new))

    async def finish(self, rollout: str, result: wire.FinishRollout) -> wire.RolloutInfo:
        """See `GatewayClient.finish_rollout`."""
        return await self._call(lambda: self._client.finish_rollout(rollout, result))

    async def rollout(self, rollout: str) -> wire.RolloutInfo:
        """See `GatewayClient.rollout`."""
        return await self._call(lambda: self._client.rollout(rollout))

    async def open_rollouts(self) -> list[wire.RolloutInfo]:
        """See `GatewayClient.open_rollouts`."""
        return await self._call(self._client.open_rollouts)

    async def group_rollouts(self, group: str) -> list[wire.RolloutInfo]:
        """See `GatewayClient.group_rollouts`."""
        return await self._call(lambda: self._client.group_rollouts(group))

    async def status(self) -> wire.Status:
        """See `GatewayClient.status`."""
        return await self._call(self._client.status)

    async def _call(self, call: Callable[[], R]) -> R:
        """Run `call` in a thread until it is answered.

        Raises:
            Fault: `gateway_unavailable` when the patience is spent, `gateway_refused` for a refusal.
        """
        deadline, pause_s = time.monotonic() + self._patience_s, FIRST_PAUSE_S
        while True:
            try:
                answer = await asyncio.to_thread(call)
                self._waiting = False
                return answer
            except GatewayError as error:
                if error.status not in TRANSIENT:
                    raise Fault("gateway_refused", f"status {error.status}: {error}") from error
                if time.monotonic() + pause_s > deadline:
                    raise Fault("gateway_unavailable", str(error)) from error
                if not self._waiting:
                    self._waiting = True
                    log.warning("the gateway does not answer, trying again for %.0f s: %s", self._patience_s, error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
