"""What serves agents, as one value: engines, versions, this worker's turns and its sessions.

Routes and exchanges reach everything through it; nothing else that serves a turn holds state. There is one in each
worker, and in a gateway that is one process it stands beside `Control`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from turngate.proxy.drain import Drain
from turngate.proxy.engine.endings import Endings
from turngate.proxy.engines import Engines
from turngate.proxy.errors import GatewayRefusal, MissingExtra
from turngate.proxy.metrics import Course, Metrics
from turngate.proxy.pacing import Pace
from turngate.proxy.reattach import Tellings
from turngate.proxy.sessions import Session, Sessions
from turngate.proxy.settings import GatewaySettings
from turngate.proxy.store.control import ControlStore
from turngate.proxy.store.turnstore import TurnStore
from turngate.proxy.store.writer import TurnWriter
from turngate.proxy.tail import StubCounts
from turngate.proxy.teachers import Teachers
from turngate.proxy.turns import Turn
from turngate.proxy.versions import Versions
from turngate.proxy.vitals import give_memory_back, process_gauges, unwritable, watch_loop_lag

if TYPE_CHECKING:
    from turngate.proxy.tracing import TurnTracer

log = logging.getLogger("turngate.gateway")


class Gateway:
    """Made within a running event loop, ended by `close`; what it was given stays the caller's to close.

    Args:
        control: the control store; a worker has it read-only.
        turns: the turn file of worker `worker`, owned by this process.
        utc_ns: the process's clock, see `turngate.proxy.clock`.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        worker: int,
        control: ControlStore,
        turns: TurnStore,
        engines: Engines,
        versions: Versions,
        metrics: Metrics,
        utc_ns: Callable[[], int] = time.time_ns,
        tracer: TurnTracer | None = None,
    ) -> None:
        self.settings = settings
        self.utc_ns = utc_ns
        self.worker = worker
        self.turns = turns
        self.versions = versions
        self.metrics, self.drain = metrics, Drain()
        self.replicas = engines.replicas
        self.engines = engines.failover
        self.capabilities = engines.capabilities
        self.facts, self.stubs = engines.facts, StubCounts()
        self.exact = engines.exact
        self.ends = engines.ends
        self.endings, self.pace = Endings(), Pace(settings.stream_s)
        self.writer = TurnWriter(turns)
        self.teachers = Teachers()
        self.tellings = Tellings(settings.reattach_s, metrics.cancelled, metrics.reattached)
        self.drain.when_begun(self.tellings.drain)
        self.sessions = Sessions(
            settings, control, turns, self.writer, worker=worker, released=self._session_closed, utc_ns=utc_ns
        )
        self._tracer = tracer
        self._lag = asyncio.create_task(watch_loop_lag(partial(self.metrics.observe, "turngate_loop_lag_seconds")))
        self._kept = 0
        self._trim = asyncio.create_task(give_memory_back(lambda: self._kept))
        self._open = True
        log.info("ready", extra={"model": self.capabilities.model, "exact": self.exact})

    async def close(self) -> None:
        """Write what is queued; no turn is kept after this."""
        self._open = False
        self._lag.cancel()
        self._trim.cancel()
        await self.tellings.close()
        await self.teachers.close()
        await self.writer.close()

    def turn_kept(self, turn: Turn, course: Course) -> None:
        """A turn was committed: count it, and say so where logs are that loud."""
        self._kept += 1
        self.metrics.turn(turn, course)
        self.pace.saw(turn)
        if self._tracer is not None:
            self._tracer.turn(turn, course)
        log.debug(
            "turn_kept", extra={"seq": turn.seq, "kind": turn.kind, "completion_tokens": len(turn.completion_ids)}
        )

    def turn_refused(self, rollout: str, turn: str, refusal: GatewayRefusal) -> None:
        """A turn was not served: count it."""
        self.metrics.refusal(refusal.code)
        if self._tracer is not None:
            self._tracer.refused(rollout, turn, refusal.code, self.utc_ns())

    def _session_closed(self, session: Session) -> None:
        self.replicas.release(session.id)
        self.tellings.give_up_all(session.tellings)

    async def missing(self) -> list[str]:
        """What keeps turns from being served now, in words; empty when nothing does."""
        found = [] if self._open else ["the gateway is not open"]
        if self.drain.draining:
            found.append("the gateway is ending (draining)")
        if not self.replicas.healthy:
            found.append(f"no engine is healthy: {', '.join(replica.name for replica in self.replicas.all)}")
        store, min_free_bytes = self.settings.store, self.settings.min_free_bytes
        if (why := await asyncio.to_thread(unwritable, store, min_free_bytes)) is not None:
            found.append(why)
        return found

    async def exposition(self, more: Mapping[str, float] | None = None) -> str:
        """Its metrics in Prometheus' text format, with `more` gauges."""
        gauges = {
            **(more or {}),
            "turngate_open_sessions": float(self.sessions.open_count),
            "turngate_turns_in_flight": float(self.drain.in_flight),
            "turngate_unheard_turns": float(len(self.tellings.unheard)),
            "turngate_draining": float(self.drain.draining),
            "turngate_engines": float(len(self.replicas.all)),
            "turngate_healthy_engines": float(len(self.replicas.healthy)),
            "turngate_tasks": float(len(asyncio.all_tasks())),
            **process_gauges(),
            **self.replicas.gauges(),
        }
        return self.metrics.text(gauges)


def open_tracer(endpoint: str | None, run: str) -> TurnTracer | None:
    """A tracer that sends spans to `endpoint`; None without one.

    Raises:
        MissingExtra: OpenTelemetry is not installed.
    """
    if endpoint is None:
        return None
    try:
        from turngate.proxy.tracing import otlp_tracer
    except ModuleNotFoundError as error:
        raise MissingExtra(f"--otel needs the package {error.name!r}: pip install 'turngate[otel]'") from error
    return otlp_tracer(endpoint, run)
