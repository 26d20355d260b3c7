"""The doctor's checks of the engines: everything the gateway would find out at its start, in words.

It asks the same probes as the gateway, so the two cannot disagree. With an adapter it loads it for real and unloads it
again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from turngate.proxy.engine.errors import EngineError
from turngate.proxy.engine.http import EngineHttp
from turngate.proxy.engine.replica import Replica
from turngate.proxy.engine.types import Capabilities

Line = tuple[str, str, str, str]

ADAPTER = "turngate-doctor"
SCALE_OUT = "start vLLM 0.32 with --enable-scale-out (0.26 serves them without it)"
PROCESSED = "start vLLM with --logprobs-mode processed_logprobs"
PARSER = "if agents use tools: --enable-auto-tool-choice --tool-call-parser <the model's>"
LORA = "to train: --enable-lora --max-lora-rank R, VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in vLLM's environment"
ONE_PLACE = "use --max-loras 2 or more: one place stays empty, see docs/decisions.md"


def checks(options: Mapping[str, Any]) -> Iterator[Line]:
    """Lines about every engine that was named."""
    if not options["engines"]:
        yield "warn", "engine", "none was named, so none was looked at", "turngate doctor --engine URL"
    for url in options["engines"]:
        yield from asyncio.run(_engine(url, options["render"], options["adapter"]))


async def _engine(url: str, render: str | None, adapter: Path | None) -> list[Line]:
    http = EngineHttp()
    try:
        replica = Replica("doctor", url, http, render)
        try:
            found = await replica.probe()
        except (EngineError, ValueError) as error:  # ValueError: it is no URL
            return [("fail", "engine", f"{url}: {error}", "is vLLM running there, and is the URL without /v1?")]
        lines = describe(url, found)
        if adapter is not None:
            lines.append(await _load(replica, adapter))
        return lines
    finally:
        await http.aclose()


def describe(url: str, found: Capabilities) -> list[Line]:
    """What an engine's capabilities mean for the gateway."""
    version = found.vllm_version or "of unknown version"
    words = f"{url}: vLLM {version} serves {found.model}, context {found.max_model_len}"
    lines: list[Line] = [("ok", "engine", words, "")]
    if found.exact:
        lines.append(("ok", "exact tokens", "render, generate and derender are there", ""))
    else:
        words = "no render, generate and derender: sessions would be `transparent`, breaks counted"
        lines.append(("fail", "exact tokens", words, SCALE_OUT))
    if found.logprobs_mode == "processed":
        lines.append(("ok", "log-probs", "are of the sampled distribution", ""))
    elif found.logprobs_mode == "raw":
        lines.append(("fail", "log-probs", "are taken before temperature and top-p: no training", PROCESSED))
    else:
        lines.append(("warn", "log-probs", "could not be told apart from raw ones on this model", PROCESSED))
    if found.has_parser:
        lines.append(("ok", "tool parser", "is configured", ""))
    else:
        lines.append(("warn", "tool parser", "there is none, so agents' tools are refused or ignored", PARSER))
    if not found.runtime_lora:
        lines.append(("warn", "adapters", "cannot be loaded while the engine runs", LORA))
    elif found.max_loras is not None and found.max_loras < 2:
        lines.append(("warn", "adapters", f"can be loaded, but --max-loras is {found.max_loras}", ONE_PLACE))
    else:
        places = "an unknown number of" if found.max_loras is None else found.max_loras
        lines.append(("ok", "adapters", f"can be loaded while the engine runs, {places} places", ""))
    if found.exact and not found.derender_streams:
        lines.append(("ok", "streaming", "plain text streams; tool calls come whole (vLLM 0.26)", ""))
    return lines


async def _load(replica: Replica, adapter: Path) -> Line:
    try:
        await replica.load_adapter(ADAPTER, str(adapter.resolve()))
        there = ADAPTER in await replica.models()
        await replica.unload_adapter(ADAPTER)
    except EngineError as error:
        return "fail", "adapter", str(error), "vLLM's log has more"
    if not there:
        return "fail", "adapter", f"{adapter} was loaded but is not listed", "vLLM's log has more"
    return "ok", "adapter", f"{adapter} was loaded and unloaded again", ""
