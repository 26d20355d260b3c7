"""The engines as one value: their connections, what they can do, and what their chat template does to history.

Probed once a gateway, by the control process; workers begin with what it found, so that a restarted one serves at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from turngate.proxy.engine.failover import Failover
from turngate.proxy.engine.gate import AdmissionLimits
from turngate.proxy.engine.http import EngineHttp
from turngate.proxy.engine.replicas import Replicas
from turngate.proxy.engine.types import Capabilities
from turngate.proxy.engine.whole_derender import added_token_ids
from turngate.proxy.metrics import Metrics
from turngate.proxy.settings import GatewaySettings
from turngate.proxy.store.layout import StoreFolder
from turngate.proxy.tail import TemplateFacts
from turngate.proxy.template_probe import probe_template
from turngate.proxy.tokenizer import keep_tokenizer, load_tokenizer, plain_decode
from turngate.proxy.turns import IntArray

log = logging.getLogger("turngate.engines")


@dataclass(frozen=True, slots=True)
class Found:
    """What probing found: `replicas` in the order of the settings; whether the store has the model's tokenizer."""

    replicas: tuple[Capabilities | None, ...]
    facts: TemplateFacts
    has_tokenizer: bool


class Engines:
    """Built by `open` or `adopt`, ended by `close`."""

    def __init__(self, settings: GatewaySettings, folder: StoreFolder, metrics: Metrics) -> None:
        self.http = EngineHttp(read_timeout_s=settings.engine_silence_s)
        renders = [settings.render] * len(settings.engines) if settings.render else None
        admission = AdmissionLimits(
            settings.admission_queue,
            settings.admission_kv_usage,
            settings.admission_wait_s if settings.admission == "wait" else 0.0,
        )
        self.replicas = Replicas(
            settings.engines, self.http, render_urls=renders, admission=admission, count=metrics.engine
        )
        self._settings = settings
        self._folder = folder
        self._count = metrics.engine
        self.found: Found

    @classmethod
    async def open(cls, settings: GatewaySettings, folder: StoreFolder, metrics: Metrics) -> Self:
        """Wait for the engines and probe what they can do; the store keeps the tokenizer and the stop tokens.

        Raises:
            EngineError: no engine answered in time, or it lacks what `mode: exact` needs.
        """
        self = cls(settings, folder, metrics)
        await self.replicas.start(wait_s=settings.engine_wait_s, require_exact=settings.mode == "exact")
        for warning in self.replicas.warnings():
            log.warning("engine_lacks", extra={"what": warning})
        facts = await self._probe_template()
        kept = keep_tokenizer(folder.tokenizer, settings.tokenizer or await self._model_root())
        await self._take(Found(tuple(replica.capabilities for replica in self.replicas.all), facts, kept))
        folder.keep_stop_ids(self.ends)
        return self

    @classmethod
    async def adopt(
        cls,
        settings: GatewaySettings,
        folder: StoreFolder,
        metrics: Metrics,
        found: Found,
        adapters: Callable[[], Mapping[str, str]],
    ) -> Self:
        """The same engines in a worker; `adapters` (name -> folder) are what they must have."""
        self = cls(settings, folder, metrics)
        self.replicas.adopt(found.replicas, adapters)
        await self._take(found)
        return self

    async def close(self) -> None:
        """Stop watching and close the connections."""
        await self.replicas.stop()
        await self.http.aclose()

    async def _take(self, found: Found) -> None:
        self.found = found
        self.facts: TemplateFacts = found.facts
        self.capabilities: Capabilities = self.replicas.capabilities
        self.exact: bool = self.capabilities.exact and self._settings.mode != "transparent"
        self.ends = frozenset(end for end in (self.facts.end_of_turn, self.facts.end_of_call) if end is not None)
        tokenizer = None
        if found.has_tokenizer:
            tokenizer = await asyncio.to_thread(load_tokenizer, self._folder.tokenizer)
            self.replicas.set_tokenizer(tokenizer, added_token_ids(self._folder.tokenizer.read_bytes()))
        self.failover = Failover(
            self.replicas, self._settings.failover_wait_s, plain_decode(tokenizer), self.ends, self._count
        )

    async def _model_root(self) -> str | None:
        """Where the engine has the model from: a folder or a hub id."""
        listed = await self.http.get(f"{self.replicas.all[0].url}/v1/models")
        model = self.replicas.capabilities.model
        return next((one.get("root") for one in listed["data"] if one["id"] == model), None)

    async def _probe_template(self) -> TemplateFacts:
        replica = self.replicas.pick("probe")

        async def render(body: Mapping[str, Any]) -> IntArray:
            return (await replica.render(body)).ids

        try:
            return await probe_template(render)
        finally:
            self.replicas.release("probe")
