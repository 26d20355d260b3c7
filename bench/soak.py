#!/usr/bin/env python3
"""A long run at part of what this machine can do, to see what only time shows: leaks, slowing down, a store gone bad.

    python bench/soak.py                     # 30 minutes at 70 % of the capacity, which is measured first
    python bench/soak.py --minutes 3

Agents, a fake engine and the gateway are processes of their own. Sessions come and go: each plays its turns, is scored
in a group of four, leased and acknowledged by a small trainer; one in twenty is left in the middle of a turn. The
capacity is the rate of turns of as many agents as there are, none of them waiting. The last line is one JSON object
with the figures, samples over time and what was checked; exit status 1 when a check fails:

    verified    `turngate verify` finds every row exact, and every turn that an agent saw is in the store
    errors      no turn was answered with an error
    memory      resident memory does not grow by more than 5 % (and 10 MB) over the last two thirds
    files       neither file descriptors nor tasks of the event loop are more at the end than in the first third
    latency     median of the last third at most 1.25 of the first's + 10 ms, p99 twice + 50 ms (on a quiet machine)
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.agent_load import TOOLS, Shape, Texts, fillers, streamed_answer, whole_answer
from bench.measuring import fake_engine, file_system, folder_bytes, percentile, rss_mb
from tests.gateway_process import GatewayProcess
from turngate.proxy import wire
from turngate.proxy.client import GatewayClient

GROUP = 4
LEFT_SHARE = 0.05
POOL = 64
SAMPLES = 180


@dataclass
class Seen:
    """What the agents saw: (when it ended, wall time) of each turn in s, and counts."""

    turns: list[tuple[float, float]] = field(default_factory=list)
    sessions: int = 0
    left: int = 0
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Load:
    """How agents behave: `turns_per_s` over all of them, None for as fast as they can."""

    agents: int
    shape: Shape
    turns_per_s: float | None


class Pace:
    """Says when the next turn of the whole load is due."""

    def __init__(self, turns_per_s: float | None) -> None:
        self._gap_s = 0.0 if turns_per_s is None else 1 / turns_per_s
        self._next_s = time.monotonic()

    async def turn(self) -> None:
        """Wait for the next turn's time; late ones are not caught up with."""
        due_s = max(self._next_s, time.monotonic() - self._gap_s)
        self._next_s = due_s + self._gap_s
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))


async def play(
    gateway: GatewayProcess, load: Load, texts: list[str], first: list[str], until_s: float, seen: Seen
) -> None:
    """`load.agents` agents, session after session, until the time is over."""
    numbers, pace, dice = count(), Pace(load.turns_per_s), random.Random(0)
    run = f"{time.time_ns():x}"
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)

    async def session(client: httpx.AsyncClient, number: int) -> None:
        new = {"group": f"{run}-{number // GROUP}", "group_size": GROUP}
        created, _ = await asyncio.to_thread(gateway.session, **new)
        leaves = dice.randrange(load.shape.turns) if dice.random() < LEFT_SHARE else None
        messages: list[dict[str, Any]] = [{"role": "user", "content": dice.choice(first)}]
        for turn in range(load.shape.turns):
            await pace.turn()
            if time.monotonic() >= until_s:
                break
            if turn == leaves:
                await leave(client, created.base_url, messages)
                seen.left += 1
                break
            messages = await ask(client, created.base_url, messages, dice.choice(texts), turn % 2 == 0, seen)
        result = wire.FinishRollout(reward=dice.random())
        await asyncio.to_thread(gateway.client.finish_rollout, created.id, result)
        seen.sessions += 1

    async with httpx.AsyncClient(timeout=300, trust_env=False, limits=limits) as client:

        async def agent() -> None:
            while time.monotonic() < until_s:
                try:
                    await session(client, next(numbers))
                except (RuntimeError, httpx.HTTPError) as error:
                    seen.errors.append(repr(error)[:300])

        await asyncio.gather(*(agent() for _ in range(load.agents)))


async def ask(
    client: httpx.AsyncClient, base_url: str, messages: list[dict[str, Any]], more: str, stream: bool, seen: Seen
) -> list[dict[str, Any]]:
    """One turn; the history for the next one.

    Raises:
        RuntimeError: it was answered with anything but a whole answer.
    """
    body = {"messages": messages, "tools": TOOLS, "stream": stream, "stream_options": {"include_usage": True}}
    begun_s = time.monotonic()
    response = await client.post(f"{base_url}/chat/completions", json=body if stream else {**body, "stream": False})
    ended_s = time.monotonic()
    if response.status_code != 200:
        raise RuntimeError(f"HTTP {response.status_code}: {response.text[:200]}")
    message = (streamed_answer(response.content) if stream else whole_answer(response.json()))["message"]
    seen.turns.append((ended_s, ended_s - begun_s))
    calls = message.get("tool_calls") or []
    replies = [{"role": "tool", "tool_call_id": call["id"], "content": more} for call in calls]
    return [*messages, message, *(replies or [{"role": "user", "content": more}])]


async def leave(client: httpx.AsyncClient, base_url: str, messages: list[dict[str, Any]]) -> None:
    """Ask for a turn and hang up at its first words."""
    body = {"messages": messages, "tools": TOOLS, "stream": True}
    async with client.stream("POST", f"{base_url}/chat/completions", json=body) as response:
        async for _ in response.aiter_bytes():
            return


async def train(url: str, key: str, over: asyncio.Event) -> None:
    """Lease what is finished and call it trained, as a trainer would."""
    with GatewayClient(url, key) as client:
        for step in count(1):
            if over.is_set():
                return
            lease = await asyncio.to_thread(client.lease, wire.NewLease(policy="policy", max_groups=8))
            if lease.groups:
                told = [wire.GroupAck(group=group.id, fate="trained") for group in lease.groups]
                ack = wire.AckLease(epoch=lease.epoch, step=step, groups=told)
                await asyncio.to_thread(client.ack, lease.lease, ack)
                done = wire.DurableStep(policy="policy", step=step, path=f"step-{step}")
                await asyncio.to_thread(client.durable, done)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), 5)


def exposition(url: str) -> dict[str, float]:
    """The gateway's metrics, by name with labels."""
    lines = httpx.get(f"{url}/metrics", timeout=60, trust_env=False).text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


async def watch(gateway: GatewayProcess, every_s: float, samples: list[dict[str, float]], over: asyncio.Event) -> None:
    """Take a sample of the gateway every so often."""
    assert gateway.process is not None
    begun_s = time.monotonic()
    lag = {"sum": 0.0, "count": 0.0}
    while not over.is_set():
        now = await asyncio.to_thread(exposition, gateway.url)
        fresh = {key: now[f"turngate_loop_lag_seconds_{key}"] for key in lag}
        ran = max(fresh["count"] - lag["count"], 1.0)
        samples.append(
            {
                "at_s": round(time.monotonic() - begun_s, 1),
                "rss_mb": round(rss_mb(gateway.process.pid), 1),
                "files": now["process_open_fds"],
                "tasks": now["turngate_tasks"],
                "open_sessions": now["turngate_open_sessions"],
                "loop_lag_mean_ms": round((fresh["sum"] - lag["sum"]) / ran * 1e3, 2),
            }
        )
        lag = fresh
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), every_s)


def lag_percentile_ms(metrics: dict[str, float], share: float) -> float:
    """The upper end of the histogram's bucket in which that share of all looks at the loop's lag is reached."""
    head = 'turngate_loop_lag_seconds_bucket{le="'
    buckets = [(float(name[len(head) : -2]), value) for name, value in metrics.items() if name.startswith(head)]
    total = metrics["turngate_loop_lag_seconds_count"]
    return next((bound * 1e3 for bound, reached in sorted(buckets) if reached >= share * total), 0.0)


def slope(points: list[tuple[float, float]]) -> float:
    """Least squares slope."""
    if len(points) < 2:
        return 0.0
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def thirds(seen: Seen, begun_s: float, length_s: float) -> tuple[list[float], list[float]]:
    """Wall times in ms of turns that ended in the first and in the last third."""
    first = [wall * 1e3 for at, wall in seen.turns if at < begun_s + length_s / 3]
    last = [wall * 1e3 for at, wall in seen.turns if at >= begun_s + length_s * 2 / 3]
    return first or [0.0], last or [0.0]


def judge(
    samples: list[dict[str, float]], first: list[float], last: list[float], report: dict[str, Any], seen: Seen
) -> dict[str, bool]:
    """What must hold, by name."""
    later = samples[len(samples) // 3 :]
    head = statistics.median(one["rss_mb"] for one in later[: max(1, len(later) // 4)])
    tail = statistics.median(one["rss_mb"] for one in later[-max(1, len(later) // 4) :])
    early = samples[: max(1, len(samples) // 3)]
    mid = [statistics.median(part) for part in (first, last)]
    p99 = [percentile(part, 0.99) for part in (first, last)]
    return {
        "verified": report["ok"] and report["turns"] >= len(seen.turns),
        "errors": not seen.errors,
        "memory": tail <= head * 1.05 + 10,
        "files": all(
            statistics.median(one[name] for one in samples[-3:]) <= max(one[name] for one in early) + 5
            for name in ("files", "tasks")
        ),
        "latency": mid[1] <= mid[0] * 1.25 + 10 and p99[1] <= p99[0] * 2 + 50,
    }


async def soak(gateway: GatewayProcess, load: Load, minutes: float, texts: list[str], first: list[str]) -> Any:
    """Play, train and watch for some minutes; samples, what was seen, and when it began."""
    seen, samples, over = Seen(), [], asyncio.Event()
    begun_s, key = time.monotonic(), (gateway.store / "admin.key").read_text().strip()
    others = [
        asyncio.create_task(watch(gateway, max(1.0, minutes * 60 / SAMPLES), samples, over)),
        asyncio.create_task(train(gateway.url, key, over)),
    ]
    await play(gateway, load, texts, first, begun_s + minutes * 60, seen)
    over.set()
    await asyncio.gather(*others)
    return samples, seen, begun_s


def measured(gateway: GatewayProcess, load: Load, length_s: float, texts: list[str], first: list[str]) -> float:
    """Turns a second when no agent waits; the first third of the time, in which caches fill, does not count."""
    seen, begun_s = Seen(), time.monotonic()
    asyncio.run(play(gateway, load, texts, first, begun_s + length_s, seen))
    if seen.errors:
        raise RuntimeError(f"while measuring: {seen.errors[0]}")
    counted = [at for at, _ in seen.turns if begun_s + length_s / 3 <= at <= begun_s + length_s]
    return len(counted) / (length_s * 2 / 3)


def verified(store: Path) -> dict[str, Any]:
    """What `turngate verify` says of the store."""
    command = [sys.executable, "-m", "turngate.proxy.cli", "verify", str(store), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@contextlib.contextmanager
def running(tokenizer: Path, texts: Texts, folder: Path, tokens_per_s: float, log: str) -> Iterator[GatewayProcess]:
    """A gateway before a fake engine."""
    with (
        fake_engine(tokenizer, fillers(texts), folder, tokens_per_s=tokens_per_s, keep_times=False) as engine,
        GatewayProcess(engine.url, folder / "store", "--log-level", log) as gateway,
    ):
        yield gateway


def measure(args: argparse.Namespace, tokenizer: Path, folder: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    """Capacity, soak, verification."""
    texts = Texts(Tokenizer.from_file(str(tokenizer / "tokenizer.json")), (argparse, ast, tarfile))
    shape = Shape(args.agents, args.turns, 1_000, args.last_tokens)
    more = [texts.text(shape.message_tokens, f"more {i}") for i in range(POOL)]
    first = [texts.text(shape.first_tokens - 400, f"first {i}") for i in range(POOL)]
    with running(tokenizer, texts, folder, args.tokens_per_s, "info") as gateway:
        capacity = measured(gateway, Load(args.agents, shape, None), args.measure_s, more, first)
        tell(f"capacity {capacity:.1f} turns/s; {args.minutes:g} minutes at {capacity * args.share:.1f}")
        load = Load(args.agents, shape, capacity * args.share)
        samples, seen, begun_s = asyncio.run(soak(gateway, load, args.minutes, more, first))
        metrics = exposition(gateway.url)
        status = gateway.stop()
    tell("verifying the store")
    report = verified(folder / "store")
    early, late = thirds(seen, begun_s, args.minutes * 60)
    checks = judge(samples, early, late, report, seen)
    rss = [(one["at_s"] / 3600, one["rss_mb"]) for one in samples[len(samples) // 3 :]]
    latency = {
        f"{name}_{third}_third_ms": round(percentile(part, share), 1)
        for third, part in (("first", early), ("last", late))
        for name, share in (("p50", 0.5), ("p99", 0.99))
    }
    return {
        "ok": all(checks.values()) and status == 0,
        "checks": checks,
        "minutes": args.minutes,
        "capacity_turns_per_s": round(capacity, 2),
        "turns_per_s": round(len(seen.turns) / (args.minutes * 60), 2),
        "turns": len(seen.turns),
        "sessions": seen.sessions,
        "left_by_their_agent": seen.left,
        "errors": seen.errors[:5],
        "rss_first_mb": samples[0]["rss_mb"],
        "rss_last_mb": samples[-1]["rss_mb"],
        "rss_slope_mb_per_h": round(slope(rss), 2),
        **latency,
        "loop_lag_p50_ms": lag_percentile_ms(metrics, 0.5),
        "loop_lag_p99_ms": lag_percentile_ms(metrics, 0.99),
        "loop_lag_p999_ms": lag_percentile_ms(metrics, 0.999),
        "verify": {key: report[key] for key in ("ok", "turns", "spliced", "breaks", "rows", "exact_rows")},
        "store_bytes_per_turn": round(folder_bytes(folder / "store") / max(report["turns"], 1)),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[1],
        "store_file_system": file_system(folder),
        "samples": samples,
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--share", type=float, default=0.7, help="of the measured capacity (default: 0.7)")
    parser.add_argument("--measure-s", type=float, default=60.0, help="how long the capacity is measured (default: 60)")
    parser.add_argument("--agents", type=int, default=16, help="sessions at once (default: 16)")
    parser.add_argument("--turns", type=int, default=10, help="turns of a session (default: 10)")
    parser.add_argument("--last-tokens", type=int, default=8_000, help="the prompt of its last turn (default: 8000)")
    parser.add_argument("--tokens-per-s", type=float, default=1_000.0, help="of the fake engine, for each session")
    parser.add_argument("--tokenizer", type=Path, help="model folder for the fake engine; default: the embedded Qwen")
    parser.add_argument("--folder", type=Path, help="where the store goes, on a disk; default: beside this file")
    args = parser.parse_args()
    tokenizer = args.tokenizer
    if tokenizer is None:
        from turngate.trainer.models import resolve_model

        tokenizer = Path(resolve_model("qwen-coder-0.5b"))
    with tempfile.TemporaryDirectory(dir=args.folder or Path(__file__).parent, prefix=".soak-") as folder:
        result = measure(args, tokenizer, Path(folder), lambda words: print(words, file=sys.stderr, flush=True))
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
