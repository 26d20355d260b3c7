#!/usr/bin/env python3
"""What the gateway adds to a turn: the same streamed requests straight to the engine and through the gateway.

    python bench/bench_overhead.py --engine http://127.0.0.1:8000     # a running vLLM
    python bench/bench_overhead.py                                    # the tests' fake engine, at 100 tokens/s

Both ways alternate within one run, so a noisy machine hits both alike. Each conversation grows over its turns, with the
answers echoed back. The last line is one JSON object: median and 99th percentile of the time to the first content and
of the whole answer, both ways, in ms, and the difference of the medians.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.fake_engine.runner import FakeEngine
from tests.fake_engine.settings import FakeSettings
from tests.gateway_process import GatewayProcess


@dataclass
class Times:
    """Milliseconds of each turn."""

    first_ms: list[float] = field(default_factory=list)
    whole_ms: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        """Medians and 99th percentiles."""
        return {
            "first_p50_ms": round(statistics.median(self.first_ms), 2),
            "first_p99_ms": round(percentile(self.first_ms, 0.99), 2),
            "whole_p50_ms": round(statistics.median(self.whole_ms), 2),
            "whole_p99_ms": round(percentile(self.whole_ms, 0.99), 2),
        }


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` of the values lie (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def turn(client: httpx.AsyncClient, url: str, body: dict[str, Any], times: Times) -> str:
    """One streamed turn; returns the text."""
    begun, first, text = time.perf_counter(), 0.0, ""
    async with client.stream("POST", f"{url}/chat/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                piece = choice["delta"].get("content") or ""
                if piece and not first:
                    first = time.perf_counter()
                text += piece
    ended = time.perf_counter()
    times.first_ms.append(((first or ended) - begun) * 1e3)
    times.whole_ms.append((ended - begun) * 1e3)
    return text


async def conversation(client: httpx.AsyncClient, url: str, model: str, args: Any, times: Times, name: str) -> None:
    """A conversation of `args.turns` turns."""
    messages = [{"role": "user", "content": f"Conversation {name}. Tell me about the sea. " + "word " * args.words}]
    for _ in range(args.turns):
        body = {"model": model, "messages": messages, "stream": True, "temperature": 1.0}
        text = await turn(client, url, {**body, "max_tokens": args.tokens, "min_tokens": args.tokens}, times)
        messages = [
            *messages,
            {"role": "assistant", "content": text},
            {"role": "user", "content": "Go on. " + "word " * 50},
        ]


async def measure(engine: str, model: str, gateway: GatewayProcess, args: Any) -> dict[str, Any]:
    """Both ways, alternating."""
    direct, through = Times(), Times()
    async with httpx.AsyncClient(timeout=600, trust_env=False) as client:
        for lap in range(args.laps):
            for way, times in (("direct", direct), ("through", through)):
                urls = [
                    f"{engine}/v1" if way == "direct" else gateway.session()[0].base_url for _ in range(args.sessions)
                ]
                await asyncio.gather(
                    *(conversation(client, url, model, args, times, f"{way} {lap} {i}") for i, url in enumerate(urls))
                )
    status = gateway.client.status()
    return {
        "sessions": args.sessions,
        "turns": status.turns,
        "spliced": status.spliced,
        "breaks": status.breaks,
        "direct": direct.summary(),
        "through": through.summary(),
        "added_first_p50_ms": round(statistics.median(through.first_ms) - statistics.median(direct.first_ms), 2),
        "added_whole_p50_ms": round(statistics.median(through.whole_ms) - statistics.median(direct.whole_ms), 2),
    }


@contextlib.contextmanager
def engine_at(url: str | None, tokenizer: str) -> Iterator[str]:
    """A running engine's URL, or a fake engine's."""
    if url:
        yield url.rstrip("/")
        return
    with FakeEngine(tokenizer, settings=FakeSettings(tokens_per_s=100.0)) as fake:
        yield fake.url


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", help="URL of a running vLLM; default: the fake engine")
    parser.add_argument("--tokenizer", help="model folder for the fake engine; default: the embedded Qwen model")
    parser.add_argument("--sessions", type=int, default=4, help="conversations at once")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64, help="sampled tokens a turn")
    parser.add_argument("--words", type=int, default=500, help="size of the first message")
    parser.add_argument("--laps", type=int, default=2)
    args = parser.parse_args()
    tokenizer = args.tokenizer
    if not args.engine and not tokenizer:
        from turngate.trainer.models import resolve_model

        tokenizer = str(resolve_model("qwen-coder-0.5b"))
    with (
        tempfile.TemporaryDirectory() as folder,
        engine_at(args.engine, tokenizer) as engine,
        GatewayProcess(engine, Path(folder) / "store") as gateway,
    ):
        model = httpx.get(f"{engine}/v1/models", trust_env=False).json()["data"][0]["id"]
        print(json.dumps(asyncio.run(measure(engine, model, gateway, args))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
