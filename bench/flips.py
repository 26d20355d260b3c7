#!/usr/bin/env python3
"""Does publishing an adapter pause those who stream? Gaps between tokens during publications and without any.

    python bench/flips.py --engine http://127.0.0.1:8000 --adapter FOLDER [--streams 32] [--flips 10] [--limit-s 60]

A gateway of its own stands before a running vLLM, which loads every new version beside the streams. Each stream asks
for one answer of `--tokens` tokens after another, each in a new session, so that it takes the version routed to then.
Four parts of at least `--part-s`: without and with `--flips` publications of `--adapter` under a new version, first
with each token an event (`token`), then with the gateway's own gathering of tokens (`event`). A gap is the time between
two events of one answer. After each part the last line is one JSON object of all so far, also written to `--out`:

    PART_gap_p50_ms, PART_gap_p99_ms, PART_gap_max_ms     PART: token_still, token_flips, event_still, event_flips
    token_p99_ratio, event_p99_ratio                      99th percentile with flips over that without
    PART_answers, PART_versions, PART_errors, publish_p50_s, publish_max_s
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.measuring import percentile
from tests.gateway_process import GatewayProcess
from turngate.proxy import wire
from turngate.proxy.client import GatewayError

POLICY = "policy"


@dataclass
class Part:
    """What was seen in one part. Gaps in ms."""

    name: str
    gaps_ms: list[float] = field(default_factory=list)
    first_ms: list[float] = field(default_factory=list)
    events: int = 0
    answers: int = 0
    errors: list[str] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    publish_s: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def summary(self) -> dict[str, Any]:
        """Its figures, each under the part's name."""
        found: dict[str, Any] = {
            "seconds": round(self.seconds, 1),
            "answers": self.answers,
            "events": self.events,
            "flips": len(self.publish_s),
            "errors": len(self.errors),
            "first_error": self.errors[0] if self.errors else None,
        }
        for label, values in (("gap", self.gaps_ms), ("first", self.first_ms)):
            if values:
                found[f"{label}_p50_ms"] = round(statistics.median(values), 2)
                found[f"{label}_p99_ms"] = round(percentile(values, 0.99), 2)
                found[f"{label}_p999_ms"] = round(percentile(values, 0.999), 2)
                found[f"{label}_max_ms"] = round(max(values), 2)
        if self.publish_s:
            found["versions"] = [self.versions[0], self.versions[-1]]
            found["publish_p50_s"] = round(statistics.median(self.publish_s), 3)
            found["publish_max_s"] = round(max(self.publish_s), 3)
        return {f"{self.name}_{key}": value for key, value in found.items()}


async def answer(agents: httpx.AsyncClient, created: wire.RolloutCreated, tokens: int, part: Part) -> None:
    """One streamed answer; its gaps go to `part`."""
    body = {"model": POLICY, "stream": True, "max_tokens": tokens, "messages": [{"role": "user", "content": "Count."}]}
    asked, last = time.perf_counter(), 0.0
    headers = {"Authorization": f"Bearer {created.api_key}"}
    async with agents.stream("POST", f"{created.base_url}/chat/completions", json=body, headers=headers) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            now = time.perf_counter()
            said = json.loads(line[6:])
            if "error" in said:
                raise httpx.HTTPError(str(said["error"]))
            if not any(choice["delta"].get("content") for choice in said["choices"]):
                continue
            if last:
                part.gaps_ms.append((now - last) * 1e3)
            else:
                part.first_ms.append((now - asked) * 1e3)
            part.events += 1
            last = now
    part.answers += 1


async def stream(gateway: GatewayProcess, agents: httpx.AsyncClient, args: Any, part: Part, end: asyncio.Event) -> None:
    """Answers one after another until `end` is set."""
    new = wire.NewRollout(task="flips", training=False, sampling={"temperature": 1.0, "min_tokens": args.tokens})
    while not end.is_set():
        try:
            created = await asyncio.to_thread(gateway.client.create_rollout, new)
            await answer(agents, created, args.tokens, part)
            done = wire.FinishRollout(reward=None, outcome="cancelled", cause="measured")
            await asyncio.to_thread(gateway.client.finish_rollout, created.id, done)
        except (httpx.HTTPError, GatewayError) as error:
            part.errors.append(f"{type(error).__name__}: {error}"[:300])
            if len(part.errors) > 50:
                return
            await asyncio.sleep(0.2)


async def flip(gateway: GatewayProcess, adapter: Path, step: int, part: Part) -> None:
    """Publish the adapter as the next version."""
    began = time.perf_counter()
    new = wire.PublishAdapter(policy=POLICY, path=str(adapter.resolve()), step=step)
    info = await asyncio.to_thread(gateway.client.publish_adapter, new)
    part.publish_s.append(time.perf_counter() - began)
    part.versions.append(info.version)


async def measure(gateway: GatewayProcess, args: Any, part: Part, flips: int, ends_s: float) -> None:
    """One part: all streams, `flips` publications evenly over it, at least `part_s` long, cut at `ends_s`."""
    end, began = asyncio.Event(), time.perf_counter()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=args.streams)
    async with httpx.AsyncClient(timeout=120, trust_env=False, limits=limits) as agents:
        streams = [asyncio.create_task(stream(gateway, agents, args, part, end)) for _ in range(args.streams)]
        await asyncio.sleep(args.settle_s)
        for values in (part.gaps_ms, part.first_ms):
            values.clear()
        began = time.perf_counter()
        for step in range(flips):
            if time.monotonic() > ends_s:
                break
            await asyncio.sleep(max(0.0, began + step * args.part_s / flips - time.perf_counter()))
            await flip(gateway, args.adapter, step + 1, part)
        left = min(began + args.part_s - time.perf_counter(), ends_s - time.monotonic())
        await asyncio.sleep(max(0.0, left))
        part.seconds = time.perf_counter() - began
        end.set()
        _, slow = await asyncio.wait(streams, timeout=args.part_s + 20)
        for task in slow:
            task.cancel()


def report(parts: list[Part], args: Any) -> dict[str, Any]:
    """All figures so far."""
    found: dict[str, Any] = {"streams": args.streams, "tokens": args.tokens}
    for part in parts:
        found |= part.summary()
    for way in ("token", "event"):
        still, flips = (found.get(f"{way}_{kind}_gap_p99_ms") for kind in ("still", "flips"))
        found[f"{way}_p99_ratio"] = round(flips / still, 3) if still and flips else None
    return found


def unload(engine: str, run: str) -> None:
    """Give the engine's places of this run's adapters back."""
    with httpx.Client(base_url=engine, timeout=30, trust_env=False) as client:
        for model in client.get("/v1/models").json()["data"]:
            if run in model["id"]:
                client.post("/v1/unload_lora_adapter", json={"lora_name": model["id"]})


def main() -> int:
    """Measure, printing after each part."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", required=True, help="URL of a running vLLM that loads adapters")
    parser.add_argument("--adapter", type=Path, required=True, help="a folder in peft's format")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=192, help="of an answer")
    parser.add_argument("--flips", type=int, default=10)
    parser.add_argument("--part-s", type=float, default=10.0)
    parser.add_argument("--settle-s", type=float, default=1.0, help="streams run so long before gaps are counted")
    parser.add_argument("--limit-s", type=float, default=120.0, help="no part begins, and no flip, later than this")
    parser.add_argument("--ways", default="token,event")
    parser.add_argument("--out", type=Path, help="the same JSON object, after each part")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the gateway ends too
    ends_s, parts = time.monotonic() + args.limit_s, list[Part]()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        for way in args.ways.split(","):
            run = f"flips-{way}-{time.time_ns() % 10**9}"
            options = ["--policy", POLICY, "--log-level", "warning", "--run", run]
            options += ["--stream-s", "0"] if way == "token" else []
            store = Path(folder) / way / "store"
            gateway = stack.enter_context(GatewayProcess(args.engine, store, *options))
            asyncio.run(flip(gateway, args.adapter, 0, Part("first")))
            for kind, flips in (("still", 0), ("flips", args.flips)):
                if time.monotonic() > ends_s:
                    break
                part = Part(f"{way}_{kind}")
                parts.append(part)
                asyncio.run(measure(gateway, args, part, flips, ends_s))
                line = json.dumps(report(parts, args))
                print(line, flush=True)
                if args.out:
                    args.out.write_text(line + "\n")
            gateway.stop()
            unload(args.engine, run)
    return 0 if not any(part.errors for part in parts) else 1


if __name__ == "__main__":
    raise SystemExit(main())
