"""All engines of a gateway: who answers a session, who is healthy, which adapters everyone must have.

A session sticks to the replica that has its prefix cached; a new one goes where the fewest are. An adapter counts as
loaded only when every healthy replica confirmed it. It never re-submits a turn: that is the request path's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from turngate.proxy.engine.errors import EngineError, EngineUnavailable
from turngate.proxy.engine.http import EngineHttp
from turngate.proxy.engine.replica import Replica
from turngate.proxy.engine.types import Capabilities

_log = logging.getLogger(__name__)
_RETRY_S = 1.0

NOT_EXACT = (
    "the engine at {url} (vLLM {version}) does not serve render, generate and derender, so tokens cannot be exact: "
    "start vLLM 0.32 with --enable-scale-out (0.26 serves them without it)"
)
RAW_LOGPROBS = (
    "the engine at {url} reports log-probs before temperature and top-p ({mode}): start it with "
    "--logprobs-mode processed_logprobs to train on its turns"
)


class Replicas:
    """The engines at `urls`, all serving the same model; `render_urls[i]`, when given, renders for `urls[i]`."""

    def __init__(
        self,
        urls: Sequence[str],
        http: EngineHttp,
        *,
        render_urls: Sequence[str] | None = None,
        health_interval_s: float = 5.0,
    ) -> None:
        if not urls:
            raise ValueError("no engine URL given: a gateway needs at least one")
        renders: Sequence[str | None] = render_urls if render_urls else [None] * len(urls)
        if len(renders) != len(urls):
            raise ValueError(f"{len(urls)} engine URLs but {len(renders)} render URLs: give one for each, or none")
        self.all = tuple(
            Replica(f"engine-{i}", url, http, render) for i, (url, render) in enumerate(zip(urls, renders, strict=True))
        )
        self._healthy = {replica.name: True for replica in self.all}
        self._sticky: dict[str, Replica] = {}
        self._adapters: dict[str, str] = {}
        self._health_interval_s = health_interval_s
        self._health_task: asyncio.Task[None] | None = None

    async def start(self, *, wait_s: float = 600.0, require_exact: bool = False) -> Capabilities:
        """Probe all replicas, waiting for those that are still starting, then watch their health.

        Raises:
            EngineUnavailable: one is not up in time.
            EngineError: they serve different models, or `require_exact` and one cannot; the message says what to do.
        """
        await asyncio.gather(*(self._probe_until_up(replica, wait_s) for replica in self.all))
        models = {replica.url: replica.capabilities.model for replica in self.all if replica.capabilities}
        if len(set(models.values())) > 1:
            raise EngineError(f"the engines serve different models: {models}; use the same --served-model-name")
        if require_exact and not self.capabilities.exact:
            raise EngineError(self.warnings()[0])
        self._health_task = asyncio.create_task(self._watch(), name="engine-health")
        return self.capabilities

    async def stop(self) -> None:
        """Stop watching. The connections belong to `http`."""
        if self._health_task is not None:
            self._health_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._health_task
            self._health_task = None

    @property
    def capabilities(self) -> Capabilities:
        """What all replicas can do. Raises EngineUnavailable before `start`."""
        found = [replica.capabilities for replica in self.all if replica.capabilities is not None]
        if not found:
            raise EngineUnavailable("no engine was probed yet: start the replicas first")
        modes = {one.logprobs_mode for one in found}
        loras = [one.max_loras for one in found if one.max_loras is not None]
        return replace(
            found[0],
            max_model_len=min(one.max_model_len for one in found),
            exact=all(one.exact for one in found),
            logprobs_mode="raw" if "raw" in modes else "unknown" if "unknown" in modes else "processed",
            derender_tail_tokens=None if any(one.derender_tail_tokens is None for one in found) else 8,
            runtime_lora=all(one.runtime_lora for one in found),
            max_loras=min(loras) if loras else None,
            has_parser=all(one.has_parser for one in found),
            derender_streams=all(one.derender_streams for one in found),
        )

    def set_markers(self, markers: frozenset[int] | None) -> None:
        """Tell all replicas which ids plain text may not be streamed past (see `WholeDerender`)."""
        for replica in self.all:
            replica.markers = markers

    def warnings(self) -> list[str]:
        """What the engines lack for exact training, each with what to do; empty when all is well."""
        out = []
        for replica in self.all:
            found = replica.capabilities
            if found is None:
                continue
            if not found.exact:
                out.append(NOT_EXACT.format(url=replica.url, version=found.vllm_version or "of unknown version"))
            elif found.logprobs_mode == "raw":
                out.append(RAW_LOGPROBS.format(url=replica.url, mode=found.logprobs_mode))
        return out

    @property
    def healthy(self) -> tuple[Replica, ...]:
        """Replicas that answered their last health check."""
        return tuple(replica for replica in self.all if self._healthy[replica.name])

    def pick(self, session: str, *, exclude: Collection[str] = ()) -> Replica:
        """The session's replica; a new session, or one whose replica is ill or excluded (by name), gets another.

        Raises:
            EngineUnavailable: no healthy replica is left.
        """
        usable = [replica for replica in self.healthy if replica.name not in exclude]
        kept = self._sticky.get(session)
        if kept is not None and kept in usable:
            return kept
        if not usable:
            raise EngineUnavailable(f"none of the {len(self.all)} engines is healthy: {[r.url for r in self.all]}")
        sessions = Counter(replica.name for replica in self._sticky.values())
        chosen = min(usable, key=lambda replica: (replica.in_flight + sessions[replica.name], replica.name))
        self._sticky[session] = chosen
        return chosen

    def release(self, session: str) -> None:
        """The session is over; forget where it was."""
        self._sticky.pop(session, None)

    def mark_ill(self, replica: Replica) -> None:
        """A turn failed there: use others until its next health check."""
        self._healthy[replica.name] = False

    async def load_adapter_everywhere(self, name: str, path: str) -> None:
        """Load an adapter on every healthy replica; ill ones get it before they are used again.

        Raises:
            EngineError: one refused or did not answer; the adapter is then loaded nowhere.
        """
        results = await asyncio.gather(
            *(replica.load_adapter(name, path) for replica in self.healthy), return_exceptions=True
        )
        errors = [result for result in results if isinstance(result, BaseException)]
        if not results:
            raise EngineUnavailable(f"adapter {name} was loaded nowhere: no engine is healthy")
        if errors:
            await asyncio.gather(*(replica.unload_adapter(name) for replica in self.healthy), return_exceptions=True)
            raise errors[0]
        self._adapters[name] = path

    async def unload_everywhere(self, name: str) -> None:
        """Unload an adapter on every healthy replica. Raises EngineError if one refused."""
        self._adapters.pop(name, None)
        results = await asyncio.gather(*(r.unload_adapter(name) for r in self.healthy), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def check_health(self) -> None:
        """One round of health checks; a replica that comes back gets the adapters it lacks before it is used."""
        await asyncio.gather(*(self._check(replica) for replica in self.all))

    async def give_adapters(self, replica: Replica) -> None:
        """Load there what it lacks: an engine that was restarted has forgotten its adapters.

        Raises:
            EngineError: it refused one, or is away.
        """
        if not self._adapters:
            return
        there = await replica.models()
        for name, path in list(self._adapters.items()):
            if name not in there and name in self._adapters:
                _log.warning("engine %s lacks adapter %s: loading it again", replica.url, name)
                await replica.load_adapter(name, path)

    async def _check(self, replica: Replica) -> None:
        up = await replica.health()
        if up:
            try:
                await self.give_adapters(replica)
            except EngineError as error:
                _log.warning("engine %s is up but could not be given its adapters: %s", replica.url, error)
                up = False
        if up != self._healthy[replica.name]:
            _log.warning("engine %s is %s", replica.url, "back" if up else "not answering")
        self._healthy[replica.name] = up

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._health_interval_s)
            await self.check_health()

    async def _probe_until_up(self, replica: Replica, wait_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + wait_s
        while True:
            try:
                await replica.probe()
                return
            except EngineUnavailable as error:
                if loop.time() >= deadline_s:
                    raise EngineUnavailable(
                        f"the engine at {replica.url} was not ready within {wait_s:.0f} s ({error}); "
                        "is it running, and is the URL right?"
                    ) from error
            await asyncio.sleep(_RETRY_S)
