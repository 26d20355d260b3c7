"""A worker as the control process reaches it: a short list of questions, in the same process or over HTTP.

Everything else a worker needs it reads in the control store, so nothing has to be pushed to it and a restarted one
lacks nothing. A link never decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from turngate.proxy.gateway import Gateway
from turngate.proxy.store.records import Seal
from turngate.proxy.store.turnstore import TurnCounts


@dataclass(frozen=True, slots=True)
class Closed:
    """A closed session: nothing is added any more; `seal` is what was committed, `flags` what happened on the way."""

    seal: Seal
    flags: tuple[str, ...]


class Link(Protocol):
    """One worker."""

    worker: int

    async def close_session(self, rollout: str) -> Closed:
        """Close a session; a turn whose commit has begun is in the seal.

        Raises:
            WorkerAway: the worker did not answer; it may be asked again.
        """

    async def idle_s(self, rollout: str) -> float:
        """Seconds since the last request of an open session; 0 where one is in flight or the worker is away."""

    async def naming(self, policy: str, version: int, wait_s: float) -> int:
        """How many turns in flight name an adapter version, after waiting up to `wait_s` for them to end."""

    async def counts(self) -> TurnCounts:
        """All turns of the worker, counted."""

    async def metrics(self) -> str:
        """Its metrics in Prometheus' text format; empty while it is away."""

    def address(self, asked_at: str) -> str:
        """The base of its sessions' URLs, for a client that reached the gateway at the URL `asked_at`."""


class LocalLink:
    """The one worker of a gateway that is one process."""

    worker = 0

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def close_session(self, rollout: str) -> Closed:
        """See `Link`."""
        seal, flags = await self._gateway.sessions.close(rollout)
        return Closed(seal, flags)

    async def idle_s(self, rollout: str) -> float:
        """See `Link`."""
        return self._gateway.sessions.idle_s(rollout)

    async def naming(self, policy: str, version: int, wait_s: float) -> int:
        """See `Link`."""
        return await self._gateway.versions.naming(policy, version, wait_s)

    async def counts(self) -> TurnCounts:
        """See `Link`."""
        return self._gateway.turns.counts()

    async def metrics(self) -> str:
        """See `Link`."""
        return await self._gateway.exposition()

    def address(self, asked_at: str) -> str:
        """See `Link`."""
        return asked_at
