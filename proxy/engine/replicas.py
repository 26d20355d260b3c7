"""All engines of a gateway: who answers a session, who is healthy, which adapters everyone must have.

A session sticks to the replica that has its prefix cached; a new one goes where the fewest are. An engine that comes
back gets the adapters it lacks before any turn. It never re-submits a turn: that is `failover.py`.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from turngate.proxy.engine.errors import EngineError, EngineUnavailable
from turngate.proxy.engine.gate import AdmissionLimits, Gate
from turngate.proxy.engine.http import EngineHttp
from turngate.proxy.engine.replica import Replica
from turngate.proxy.engine.types import Capabilities, in_common

_log = logging.getLogger(__name__)
_RETRY_S = 1.0
_TICK_S = 1.0
"""How often an engine that is away is looked for, and one with turns in it is asked for its load."""

_LATE = 3
"""Health checks in a row that may come too late (a busy engine) before an engine counts as away."""

NOT_EXACT = (
    "the engine at {url} (vLLM {version}) does not serve render, generate and derender, so tokens cannot be exact: "
    "start vLLM 0.32 with --enable-scale-out (0.26 serves them without it)"
)
RAW_LOGPROBS = (
    "the engine at {url} reports log-probs before temperature and top-p ({mode}): start it with "
    "--logprobs-mode processed_logprobs to train on its turns"
)


@dataclass(slots=True)
class _State:
    """What is known of one replica. `lost`: it was away, so another engine may answer at its address now."""

    gate: Gate
    healthy: bool = True
    lost: bool = False
    late: int = 0
    check: asyncio.Task[None] | None = None
    watch: asyncio.Task[None] | None = field(default=None, repr=False)


_GAUGES: dict[str, Callable[[_State], float | None]] = {
    "up": lambda state: state.healthy,
    "turns": lambda state: state.gate.own,
    "queued_turns": lambda state: state.gate.queued,
    "running_requests": lambda state: state.gate.observed.load.running if state.gate.observed else None,
    "waiting_requests": lambda state: state.gate.observed.load.waiting if state.gate.observed else None,
    "kv_usage": lambda state: state.gate.observed.load.kv_usage if state.gate.observed else None,
}


class Replicas:
    """The engines at `urls`, all serving the same model; `render_urls[i]`, when given, renders for `urls[i]`."""

    def __init__(
        self,
        urls: Sequence[str],
        http: EngineHttp,
        *,
        render_urls: Sequence[str] | None = None,
        health_interval_s: float = 5.0,
        admission: AdmissionLimits | None = None,
        count: Callable[[str, str], None] = lambda metric, engine: None,
    ) -> None:
        if not urls:
            raise ValueError("no engine URL given: a gateway needs at least one")
        renders: Sequence[str | None] = render_urls if render_urls else [None] * len(urls)
        if len(renders) != len(urls):
            raise ValueError(f"{len(urls)} engine URLs but {len(renders)} render URLs: give one for each, or none")
        self.all = tuple(
            Replica(f"engine-{i}", url, http, render) for i, (url, render) in enumerate(zip(urls, renders, strict=True))
        )
        limits = admission or AdmissionLimits()
        self._states = {replica.name: _State(Gate(replica.name, limits, count)) for replica in self.all}
        self._sticky: dict[str, Replica] = {}
        self._adapters: dict[str, str] = {}
        self._loading: set[tuple[str, str]] = set()
        self._wanted: Callable[[], Mapping[str, str]] = lambda: self._adapters
        self._health_interval_s = health_interval_s
        self._back = asyncio.Event()
        urls_of = {url: replica.name for replica in self.all for url in (replica.url, replica.render_url)}
        self._name_of = {url: urls_of[url] for url in sorted(urls_of, key=len, reverse=True)}

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
        self._begin_watching()
        return self.capabilities

    async def stop(self) -> None:
        """Stop watching. The connections belong to `http`."""
        tasks = [task for state in self._states.values() for task in (state.watch, state.check) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for state in self._states.values():
            state.watch = state.check = None

    @property
    def capabilities(self) -> Capabilities:
        """What all replicas can do. Raises EngineUnavailable before `start`."""
        found = [replica.capabilities for replica in self.all if replica.capabilities is not None]
        if not found:
            raise EngineUnavailable("no engine was probed yet: start the replicas first")
        return in_common(found)

    def adopt(self, found: Sequence[Capabilities | None], wanted: Callable[[], Mapping[str, str]]) -> None:
        """Begin with what another process of this gateway has probed; that one also loads and unloads adapters.

        Args:
            found: capabilities of each replica, in order.
            wanted: the adapters (name -> folder) that a replica must have before it is used again.
        """
        for replica, capabilities in zip(self.all, found, strict=True):
            replica.capabilities = capabilities
        self._wanted = wanted
        self._begin_watching()

    def set_tokenizer(self, tokenizer: Tokenizer | None, markers: frozenset[int] | None) -> None:
        """Give all the run's tokenizer (None: no text ahead of derender), and the ids that text may not go past."""
        for replica in self.all:
            replica.tokenizer, replica.markers = tokenizer, markers

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
        """Replicas that take turns: they answered their last health check and have all adapters."""
        return tuple(replica for replica in self.all if self._states[replica.name].healthy)

    def gate(self, replica: Replica) -> Gate:
        """The way into one replica."""
        return self._states[replica.name].gate

    def pick(self, session: str, *, exclude: Collection[str] = ()) -> Replica:
        """The session's replica; a new session, or one whose replica is ill or excluded (by name), gets another.

        Raises:
            EngineUnavailable: no healthy replica is left.
        """
        kept = self._sticky.get(session)
        if kept is not None and self._states[kept.name].healthy and kept.name not in exclude:
            return kept
        usable = [replica for replica in self.healthy if replica.name not in exclude]
        if not usable:
            raise EngineUnavailable(
                f"none of the {len(self.all)} engines answers: {', '.join(r.name for r in self.all)}"
            )
        sessions = Counter(replica.name for replica in self._sticky.values())

        def crowd(replica: Replica) -> tuple[int, str]:
            return replica.in_flight + sessions[replica.name] + self.gate(replica).foreign, replica.name

        chosen = min(usable, key=crowd)
        self._sticky[session] = chosen
        return chosen

    def release(self, session: str) -> None:
        """The session is over; forget where it was."""
        self._sticky.pop(session, None)

    async def wait_for_any(self, limit_s: float) -> None:
        """Wait until a replica is healthy.

        Raises:
            EngineUnavailable: none is within `limit_s`.
        """
        try:
            async with asyncio.timeout(limit_s):
                while not self.healthy:
                    self._back.clear()
                    await self._back.wait()
        except TimeoutError as error:
            names = ", ".join(replica.name for replica in self.all)
            raise EngineUnavailable(
                f"none of the {len(self.all)} engines ({names}) answered within {limit_s:g} s"
            ) from error

    def mark_ill(self, replica: Replica) -> None:
        """Use others until its next health check says that it is back."""
        state = self._states[replica.name]
        state.healthy = False
        state.gate.away()

    async def suspect(self, replica: Replica) -> None:
        """A turn failed there: look at once whether it is well, and has its adapters. All who ask share one look."""
        state = self._states[replica.name]
        if state.check is None or state.check.done():
            state.check = asyncio.create_task(self._check(replica, patient=False), name=f"check-{replica.name}")
        await asyncio.shield(state.check)

    def gauges(self) -> dict[str, float]:
        """Health, turns and load of each replica, as `metrics.GAUGES` names them."""
        out: dict[str, float] = {}
        for what, of in _GAUGES.items():
            for replica in self.all:
                value = of(self._states[replica.name])
                if value is not None:
                    out[f'turngate_engine_{what}{{engine="{replica.name}"}}'] = float(value)
        return out

    def anonymous(self, text: str) -> str:
        """`text` with engines named instead of their URLs: agents must not learn where engines are."""
        for url, name in self._name_of.items():
            text = re.sub(rf"(?:the engine at )?{re.escape(url)}[^\s,;:'\"]*", name, text)
        return text

    async def load_adapter_everywhere(self, name: str, path: str) -> None:
        """Load an adapter on every healthy replica; ill ones, also those that fall ill by it, get it when they return.

        Raises:
            EngineRefused: one refused; the adapter is then loaded nowhere.
            EngineUnavailable: none is left that has it.
        """
        asked = self.healthy
        self._adapters[name] = path  # from here on: a replica that comes back meanwhile must get it, too
        results = await asyncio.gather(*(self._load(replica, name, path) for replica in asked), return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        refusals = [error for error in errors if not isinstance(error, EngineUnavailable)]
        if refusals or len(errors) == len(asked):
            del self._adapters[name]
            await asyncio.gather(*(replica.unload_adapter(name) for replica in self.healthy), return_exceptions=True)
            for replica, result in zip(asked, results, strict=True):
                if isinstance(result, EngineUnavailable):
                    self.mark_ill(replica)
            raise (
                refusals or errors or [EngineUnavailable(f"adapter {name} was loaded nowhere: no engine is healthy")]
            )[0]
        for replica, result in zip(asked, results, strict=True):
            if isinstance(result, BaseException):
                _log.warning("engine %s did not load %s, it gets it when it is back: %s", replica.url, name, result)
                self.mark_ill(replica)

    async def _load(self, replica: Replica, name: str, path: str) -> None:
        """Load it there; while that takes, health checks know that it is on its way."""
        self._loading.add((replica.name, name))
        try:
            await replica.load_adapter(name, path)
        finally:
            self._loading.discard((replica.name, name))

    async def unload_everywhere(self, name: str) -> None:
        """Unload an adapter on every healthy replica. Raises EngineError if one refused."""
        self._adapters.pop(name, None)
        results = await asyncio.gather(*(r.unload_adapter(name) for r in self.healthy), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def drop(self, names: frozenset[str]) -> None:
        """Unload those of `names` that a replica still has, as one does whose gateway was killed before it said so.

        Raises:
            EngineError: a replica refused, or is away.
        """
        for replica in self.healthy if names else ():
            for name in names.intersection(await replica.models()):
                await replica.unload_adapter(name)

    async def check_health(self) -> None:
        """One round of health checks; a replica that comes back gets the adapters it lacks before it is used."""
        await asyncio.gather(*(self.suspect(replica) for replica in self.all))

    async def give_adapters(self, replica: Replica) -> None:
        """Load there what it lacks: an engine that was restarted has forgotten its adapters.

        Raises:
            EngineError: it refused one, or is away.
        """
        given: set[str] = set()
        while missing := self._wanted().keys() - given:
            there = await replica.models()
            for name in sorted(missing):
                if name not in there and name in self._wanted() and (replica.name, name) not in self._loading:
                    _log.warning("engine %s lacks adapter %s: loading it again", replica.url, name)
                    await replica.load_adapter(name, self._wanted()[name])
                    if name not in self._wanted():  # retired meanwhile
                        await replica.unload_adapter(name)
            given |= missing

    async def _check(self, replica: Replica, *, patient: bool) -> None:
        """Find out whether `replica` is well; `patient`: one that is only late may still be."""
        state = self._states[replica.name]
        found = await replica.health()
        state.late = state.late + 1 if found == "late" else 0
        if found == "late" and patient and state.healthy and state.late < _LATE:
            return
        up, why = found == "up", "not answering" if found == "down" else "too slow to answer"
        if not up:
            state.lost = True
        try:
            if up and state.lost:
                await self._meet_again(replica)
            if up:
                await self.give_adapters(replica)  # nothing is awaited between its last look and `healthy`
                state.lost = False
        except EngineError as error:
            up, why = False, f"up, but of no use: {error}"
        if up and not state.healthy:
            _log.warning("engine %s (%s) is back", replica.name, replica.url)
            state.healthy = True
            self._back.set()
        elif not up:
            if state.healthy:
                _log.warning("engine %s (%s) is %s", replica.name, replica.url, why)
            self.mark_ill(replica)

    def _begin_watching(self) -> None:
        for replica in self.all:
            self._states[replica.name].watch = asyncio.create_task(self._watch(replica), name=f"watch-{replica.name}")

    async def _meet_again(self, replica: Replica) -> None:
        """An engine that was away may be another one now. Raises EngineError where it cannot stand in for the old."""
        before = replica.capabilities
        now = await replica.probe()
        if before is None:
            return
        worse = (
            now.model != before.model or (before.exact and not now.exact) or now.max_model_len < before.max_model_len
        )
        if worse or (before.logprobs_mode != "raw" and now.logprobs_mode == "raw"):
            replica.capabilities = before
            raise EngineError(f"it came back as {now}, it was {before}; start it as before")

    async def _watch(self, replica: Replica) -> None:
        """Look for an ill replica each tick, at a healthy one each health interval; ask busy ones for their load."""
        state, since_s = self._states[replica.name], 0.0
        tick_s = min(_TICK_S, self._health_interval_s)
        while True:
            await asyncio.sleep(tick_s)
            since_s += tick_s
            due = since_s >= self._health_interval_s
            if due or not state.healthy:
                since_s = 0.0
                if state.check is None or state.check.done():
                    state.check = asyncio.create_task(self._check(replica, patient=True))
                await asyncio.wait([state.check])
            if state.healthy and (due or state.gate.own or state.gate.queued):
                await self._observe(replica)

    async def _observe(self, replica: Replica) -> None:
        try:
            load = await replica.load()
        except EngineError as error:
            _log.debug("engine %s does not tell its load: %s", replica.url, error)
            return
        self.gate(replica).observe(load)

    async def _probe_until_up(self, replica: Replica, wait_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline_s, level = loop.time() + wait_s, logging.WARNING
        while True:
            try:
                await replica.probe()
                return
            except EngineUnavailable as error:
                if loop.time() >= deadline_s:
                    raise EngineUnavailable(
                        f"the engine at {replica.url} was not ready within {wait_s:.0f} s ({error}); is it up?"
                    ) from error
                _log.log(level, "not ready yet: %s; waiting up to %.0f s for it", error, wait_s)
                level = logging.DEBUG  # once is enough
            await asyncio.sleep(_RETRY_S)
