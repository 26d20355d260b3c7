"""The administration side as one value: the control store, policies, rollouts, and the workers that serve agents.

One a gateway. Where there is one worker it is a `Gateway` in this process; several are processes that this one starts,
watches and ends. It never touches a turn on its way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Self

from turngate.proxy.clock import SteadyUtc
from turngate.proxy.drain import Drain
from turngate.proxy.engines import Engines
from turngate.proxy.gateway import Gateway, open_tracer
from turngate.proxy.keys import admin_key
from turngate.proxy.links import Link, LocalLink
from turngate.proxy.metrics import Metrics
from turngate.proxy.policies import Policies, live_versions
from turngate.proxy.rollouts import Rollouts
from turngate.proxy.settings import GatewaySettings
from turngate.proxy.store.control import ControlStore
from turngate.proxy.store.errors import Invalid
from turngate.proxy.store.layout import StoreFolder
from turngate.proxy.store.records import RolloutRecord
from turngate.proxy.store.turn_files import TurnFiles
from turngate.proxy.store.turnstore import TurnCounts, TurnStore
from turngate.proxy.versions import Versions
from turngate.proxy.vitals import process_gauges, unwritable, watch_loop_lag
from turngate.proxy.workers.exposition import merged
from turngate.proxy.workers.fleet import Fleet

if TYPE_CHECKING:
    from turngate.proxy.tracing import TurnTracer

log = logging.getLogger("turngate.control")

IDLE_LOOK_S = 60.0


class Control:
    """Built by `open`, ended by `close`. Either `gateway` is there, in this process, or `fleet`, of several."""

    settings: GatewaySettings
    utc_ns: SteadyUtc
    admin_key: str
    store: ControlStore
    turns: TurnFiles
    engines: Engines
    policies: Policies
    rollouts: Rollouts
    links: Sequence[Link]
    metrics: Metrics
    drain: Drain
    gateway: Gateway | None = None
    fleet: Fleet | None = None
    _own: TurnStore | None = None
    _tracer: TurnTracer | None = None
    _lag: asyncio.Task[None] | None = None
    _idle: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, settings: GatewaySettings, main_port: int = 0) -> Self:
        """Open the stores, wait for the engines, load the live adapters, start what serves agents.

        Raises:
            EngineError: no engine answered in time, or it lacks what `mode: exact` needs.
            StoreError: the store cannot be opened, or a setting does not fit it or the engine.
            GatewayRefusal: a worker did not start.
        """
        self = cls()
        self.settings, self.utc_ns = settings, SteadyUtc()
        folder = StoreFolder.create(settings.store, settings.run, self.utc_ns())
        self.admin_key = admin_key(settings.admin_key_file or folder.path / "admin.key")
        self.store = ControlStore(folder.control, run=folder.run, durability=settings.durability)
        _check_workers(self.store, settings.workers)
        if settings.workers == 1:
            self._own = TurnStore(folder.turns(0), durability=settings.durability)
        self.turns = TurnFiles(folder, {} if self._own is None else {0: self._own})
        self.metrics = Metrics()
        self.engines = await Engines.open(settings, folder, self.metrics)
        versions = Versions(self.store, base_model=self.engines.capabilities.model, names=settings.policies)
        self.policies = Policies(
            self.store,
            self.engines.replicas,
            base_model=self.engines.capabilities.model,
            names=settings.policies,
            max_live=live_versions(self.engines.capabilities.max_loras, settings.max_live_versions),
            naming=self._naming,
            changed=versions.refresh,
            utc_ns=self.utc_ns,
        )
        await self.policies.restore()
        self._tracer = open_tracer(settings.otel, folder.run)
        await self._open_workers(folder, versions, main_port)
        self.rollouts = Rollouts(
            settings,
            self.store,
            self.policies,
            self.links,
            exact_logprobs=self.engines.capabilities.logprobs_mode != "raw",
            finished=self._finished,
            utc_ns=self.utc_ns,
        )
        await self.policies.retire_unused(self.rollouts.cancel_pinned)
        if settings.session_idle_s > 0:
            self._idle = asyncio.create_task(self._close_idle(settings.session_idle_s))
        return self

    async def _open_workers(self, folder: StoreFolder, versions: Versions, main_port: int) -> None:
        if self._own is not None:
            self.gateway = Gateway(
                self.settings,
                worker=0,
                control=self.store,
                turns=self._own,
                engines=self.engines,
                versions=versions,
                metrics=self.metrics,
                utc_ns=self.utc_ns,
                tracer=self._tracer,
            )
            self.drain = self.gateway.drain
            self.links = [LocalLink(self.gateway)]
            return
        self.drain = Drain()
        self._lag = asyncio.create_task(watch_loop_lag(partial(self.metrics.observe, "turngate_loop_lag_seconds")))
        self.fleet = await Fleet.start(self.settings, folder, self.engines.found, self.turns, main_port, self.drain)
        self.links = self.fleet.links

    async def close(self) -> None:
        """Let what serves agents write what is queued, then close everything."""
        for watch in (self._lag, self._idle):
            if watch is not None:
                watch.cancel()
        if self.fleet is not None:
            await self.fleet.stop()
        if self.gateway is not None:
            await self.gateway.close()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)
        await self.policies.close()
        await self.engines.close()
        self.turns.close()
        if self._own is not None:
            self._own.close()
        self.store.close()

    async def missing(self) -> list[str]:
        """What keeps turns from being served now, in words; empty when nothing does."""
        if self.fleet is None:
            return [] if self.gateway is None else await self.gateway.missing()
        found = [f"worker {worker} is not up" for worker in self.fleet.down()]
        if self.drain.draining:  # workers without turns have ended
            found = ["the gateway is ending (draining)"]
        if not self.engines.replicas.healthy:
            found.append(f"no engine is healthy: {', '.join(replica.name for replica in self.engines.replicas.all)}")
        store, min_free_bytes = self.settings.store, self.settings.min_free_bytes
        if (why := await asyncio.to_thread(unwritable, store, min_free_bytes)) is not None:
            found.append(why)
        return found

    async def counts(self) -> TurnCounts:
        """All turns of all workers, counted."""
        found = TurnCounts()
        for counts in await asyncio.gather(*(link.counts() for link in self.links)):
            found = found.plus(counts)
        return found

    async def exposition(self) -> str:
        """The metrics of all processes in Prometheus' text format; those of workers have the label `worker`."""
        restarts = 0 if self.fleet is None else self.fleet.restarts
        workers = {
            "turngate_workers": float(len(self.links)),
            "turngate_worker_restarts_total": float(restarts),
        }
        if self.gateway is not None:
            return await self.gateway.exposition(workers)
        texts = await asyncio.gather(*(link.metrics() for link in self.links))
        gauges = {
            **workers,
            "turngate_draining": float(self.drain.draining),
            "turngate_engines": float(len(self.engines.replicas.all)),
            "turngate_healthy_engines": float(len(self.engines.replicas.healthy)),
            "turngate_tasks": float(len(asyncio.all_tasks())),
            **process_gauges(),
            **self.engines.replicas.gauges(),
        }
        return merged(
            self.metrics.text(gauges), {link.worker: text for link, text in zip(self.links, texts, strict=True)}
        )

    async def _naming(self, policy: str, version: int, wait_s: float) -> int:
        return sum(await asyncio.gather(*(link.naming(policy, version, wait_s) for link in self.links)))

    async def _close_idle(self, longest_s: float) -> None:
        while True:
            await asyncio.sleep(min(IDLE_LOOK_S, longest_s / 4))
            for record in await self.rollouts.close_idle(longest_s):
                self.metrics.idle()
                log.warning("session_idle", extra={"rollout": record.id, "task": record.new.task})

    def _finished(self, record: RolloutRecord) -> None:
        if self._tracer is not None:
            self._tracer.rollout(record)


def _check_workers(store: ControlStore, workers: int) -> None:
    """A session never moves: refuse to start without the workers that have open ones.

    Raises:
        Invalid: more workers are needed.
    """
    opened = store.open_by_worker()
    needed = max(opened, default=0) + 1
    if needed > workers:
        stranded = sum(count for worker, count in opened.items() if worker >= workers)
        raise Invalid(
            f"{stranded} open rollouts of this store are on workers above {workers - 1}, and sessions do not move: "
            f"start with --workers {needed}, finish them, then start with {workers}"
        )
