"""The gateway as one value: engines, policies, stores and sessions, opened and closed together.

Routes and exchanges reach everything through it; nothing else in the package holds state.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from turngate.proxy.drain import Drain
from turngate.proxy.engine.failover import Failover
from turngate.proxy.engine.gate import AdmissionLimits
from turngate.proxy.engine.http import EngineHttp
from turngate.proxy.engine.replicas import Replicas
from turngate.proxy.engine.types import Capabilities
from turngate.proxy.engine.whole_derender import added_token_ids
from turngate.proxy.errors import GatewayRefusal, MissingExtra
from turngate.proxy.metrics import Course, Metrics
from turngate.proxy.policies import Policies
from turngate.proxy.sessions import Sessions
from turngate.proxy.settings import GatewaySettings
from turngate.proxy.store.control import ControlStore
from turngate.proxy.store.layout import StoreFolder
from turngate.proxy.store.turnstore import TurnStore
from turngate.proxy.store.writer import TurnWriter
from turngate.proxy.tail import StubCounts, TemplateFacts
from turngate.proxy.template_probe import probe_template
from turngate.proxy.tokenizer import keep_tokenizer, load_tokenizer, plain_decode
from turngate.proxy.turns import IntArray, Turn
from turngate.proxy.vitals import unwritable, watch_loop_lag

if TYPE_CHECKING:
    from turngate.proxy.tracing import TurnTracer

log = logging.getLogger("turngate.gateway")


class Gateway:
    """Built by `open`, ended by `close`."""

    settings: GatewaySettings
    admin_key: str
    http: EngineHttp
    replicas: Replicas
    engines: Failover
    capabilities: Capabilities
    facts: TemplateFacts
    stubs: StubCounts
    control: ControlStore
    turns: TurnStore
    writer: TurnWriter
    policies: Policies
    sessions: Sessions
    metrics: Metrics
    drain: Drain
    exact: bool
    ends: frozenset[int]
    ready: bool = False
    _tracer: TurnTracer | None = None
    _lag: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, settings: GatewaySettings) -> Self:
        """Open the stores, wait for the engines, probe what they can do.

        Raises:
            EngineError: no engine answered in time, or it lacks what `mode: exact` needs.
            StoreError: the store cannot be opened.
        """
        self = cls()
        self.settings = settings
        self.metrics, self.drain = Metrics(), Drain()
        folder = StoreFolder.create(settings.store, settings.run, time.time_ns())
        self.admin_key = admin_key(settings.admin_key_file or folder.path / "admin.key")
        self.control = ControlStore(folder.control, run=folder.run, durability=settings.durability)
        self.turns = TurnStore(folder.turns(0), durability=settings.durability)
        self.writer = TurnWriter(self.turns)
        self.http = EngineHttp(read_timeout_s=settings.engine_silence_s)
        renders = [settings.render] * len(settings.engines) if settings.render else None
        admission = AdmissionLimits(
            settings.admission_queue,
            settings.admission_kv_usage,
            settings.admission_wait_s if settings.admission == "wait" else 0.0,
        )
        self.replicas = Replicas(
            settings.engines, self.http, render_urls=renders, admission=admission, count=self.metrics.engine
        )
        await self.replicas.start(wait_s=settings.engine_wait_s, require_exact=settings.mode == "exact")
        for warning in self.replicas.warnings():
            log.warning("engine_lacks", extra={"what": warning})
        self.capabilities = self.replicas.capabilities
        self.exact = self.capabilities.exact and settings.mode != "transparent"
        self.facts, self.stubs = await self._probe_template(), StubCounts()
        tokenizer = None
        if keep_tokenizer(folder.tokenizer, settings.tokenizer or await self._model_root()):
            tokenizer = await asyncio.to_thread(load_tokenizer, folder.tokenizer)
            self.replicas.set_tokenizer(tokenizer, added_token_ids(folder.tokenizer.read_bytes()))
        self.ends = frozenset(end for end in (self.facts.end_of_turn, self.facts.end_of_call) if end is not None)
        folder.keep_stop_ids(self.ends)
        self.engines = Failover(
            self.replicas, settings.failover_wait_s, plain_decode(tokenizer), self.ends, self.metrics.engine
        )
        self.policies = Policies(
            self.control,
            self.replicas,
            base_model=self.capabilities.model,
            names=frozenset({settings.policy}),
            max_live=settings.max_live_versions or live_versions(self.capabilities.max_loras),
        )
        await self.policies.restore()
        self.sessions = Sessions(
            settings,
            self.control,
            self.turns,
            self.writer,
            self.policies,
            exact_logprobs=self.capabilities.logprobs_mode != "raw",
            released=self._rollout_over,
        )
        self.sessions.restore()
        self._lag = asyncio.create_task(watch_loop_lag(partial(self.metrics.observe, "turngate_loop_lag_seconds")))
        self._tracer = None if settings.otel is None else open_tracer(settings.otel, folder.run)
        self.ready = True
        log.info("ready", extra={"model": self.capabilities.model, "exact": self.exact})
        return self

    async def close(self) -> None:
        """Drain the writer and close everything."""
        self.ready = False
        if self._lag is not None:
            self._lag.cancel()
        await self.writer.close()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)
        await self.replicas.stop()
        await self.http.aclose()
        self.turns.close()
        self.control.close()

    def turn_kept(self, turn: Turn, course: Course) -> None:
        """A turn was committed: count it, and say so where logs are that loud."""
        self.metrics.turn(turn, course)
        if self._tracer is not None:
            self._tracer.turn(turn, course)
        log.debug(
            "turn_kept", extra={"seq": turn.seq, "kind": turn.kind, "completion_tokens": len(turn.completion_ids)}
        )

    def turn_refused(self, rollout: str, turn: str, refusal: GatewayRefusal) -> None:
        """A turn was not served: count it."""
        self.metrics.refusal(refusal.code)
        if self._tracer is not None:
            self._tracer.refused(rollout, turn, refusal.code, time.time_ns())

    def _rollout_over(self, rollout: str) -> None:
        """A rollout was finished: its engine is free for others, its trace complete."""
        self.replicas.release(rollout)
        if self._tracer is not None:
            self._tracer.rollout(self.control.rollout(rollout))

    async def missing(self) -> list[str]:
        """What keeps turns from being served now, in words; empty when nothing does."""
        found = [] if self.ready else ["the gateway is not open"]
        if self.drain.draining:
            found.append("the gateway is ending (draining)")
        if not self.replicas.healthy:
            found.append(f"no engine is healthy: {', '.join(replica.url for replica in self.replicas.all)}")
        if (why := await asyncio.to_thread(unwritable, self.settings.store)) is not None:
            found.append(why)
        return found

    async def _model_root(self) -> str | None:
        """Where the engine has the model from: a folder or a hub id."""
        listed = await self.http.get(f"{self.replicas.all[0].url}/v1/models")
        return next((one.get("root") for one in listed["data"] if one["id"] == self.capabilities.model), None)

    async def _probe_template(self) -> TemplateFacts:
        replica = self.replicas.pick("probe")

        async def render(body: Mapping[str, Any]) -> IntArray:
            return (await replica.render(body)).ids

        try:
            return await probe_template(render)
        finally:
            self.replicas.release("probe")


def live_versions(max_loras: int | None) -> int | None:
    """How many versions to keep loaded on an engine with `max_loras` places: one fewer, where there are several.

    With all places taken turns of other versions queue. On CPU there is a second reason, and there it only delays: see
    "One adapter place" in `docs/decisions.md`.
    """
    return None if max_loras is None else max(1, max_loras - 1)


def open_tracer(endpoint: str, run: str) -> TurnTracer:
    """A tracer that sends spans to `endpoint`.

    Raises:
        MissingExtra: OpenTelemetry is not installed.
    """
    try:
        from turngate.proxy.tracing import otlp_tracer
    except ModuleNotFoundError as error:
        raise MissingExtra(f"--otel needs the package {error.name!r}: pip install 'turngate[otel]'") from error
    return otlp_tracer(endpoint, run)


def admin_key(path: Path) -> str:
    """The administration key in `path`; generated with mode 0600 when the file is missing.

    Raises:
        PermissionError: others can read the file.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(f"tg-admin-{secrets.token_hex(24)}\n")
    if path.stat().st_mode & 0o077:
        raise PermissionError(f"{path} can be read by others; chmod 600 it, or delete it for a new key")
    return path.read_text().strip()
