#!/usr/bin/env python3
"""What a turn costs the gateway, under many agents at once; the engine is the tests' fake, at 100 tokens/s a session.

    python bench/gateway.py --shape short           # 16 sessions of 20 turns, prompts of 2k -> 18k tokens
    python bench/gateway.py --shape long            # 32 sessions of 40 turns, prompts of 16k -> 52k tokens
    python bench/gateway.py --shape huge            # 64 sessions of 3 turns, 50k -> 100k; the event loop watched
    python bench/gateway.py --workers 1,2           # the same mix with each number of gateway processes
    python bench/gateway.py --workers 1,2,4 --sessions 400 --tokens-per-s 800 --engines 6 --load-processes 7
                                                    # scaling, on 16 cores: so many agents that each number is busy
    python bench/gateway.py --idle 500              # what idle sessions cost in memory
    python bench/gateway.py --peer openenv          # OpenEnv 0.10's capture proxy on the same mix, and the ratios

Agents (this process, or `--load-processes`), engines (`--engines`) and gateway are separate processes. 200 tokens a
turn, one in each event of the engine, unless the gateway asks for several (vLLM 0.32's `stream_interval`; the output
says what it asked for, `--no-interval` is an engine that does not take it). Half of the sessions stream; about half of
the answers call a tool. CPU is user and system time of all the gateway's processes, from /proc. The store is on a disk,
with the default durability. The engines have read every message once before, so that their tokenising is not measured.
The last line is one JSON object:

    cpu_ms_per_turn, turns_per_s_per_core   CPU of the gateway, and its inverse
    p50_overhead_ms, p99_overhead_ms        the agent's wall time less the engine's own time for that turn
    rss_mb_per_session                      growth of the resident memory, sessions still open
    store_bytes_per_turn                    growth of the store's folder, after the gateway has ended
    spliced_share                           of all turns but the first of each session: must be 1.0
    cpu_ms_quarters, last_over_first        CPU a turn in each quarter of the turns; the last by the first
    core_wait_ms_per_turn                   how long the gateway's threads waited for a core: to judge overheads by
    load_average, engine_cores, load_cores  the machine's load, and CPU seconds a second of the two others
    turns_per_s_steady                      between the first fifth of the turns and the last one
    busiest_cores                           the busiest process of each kind: what the rate of turns was bounded by
    by_workers, over_first                  with several numbers of processes: each, and its rate by the first one's

Overheads include what these processes do to each other where they share cores. The engine's own time is that of the
sampling; OpenEnv's proxy asks for chat completions, so there it is that of the whole request, with the engine's
templating, tokenising and parsing in it, while the gateway's requests for these count as its overhead. OpenEnv's proxy
answers streams from whole answers, and keeps its turns in memory; the same agents send it the same messages, the same
engines answer at the same pace.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import contextlib
import email.message
import functools
import json
import os
import signal
import statistics
import sys
import tarfile
import tempfile
import typing
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import idle_sessions
from bench.agent_load import (
    ANSWER_TOKENS,
    SHAPES,
    TOKENS_PER_S,
    TOOLS,
    Seen,
    Shape,
    Texts,
    all_at_once,
    fillers,
    warming,
)
from bench.load_processes import parts, play
from bench.measuring import (
    ROOT,
    FakeProcess,
    core_wait_ms,
    cpu_ms,
    fake_engine,
    file_system,
    folder_bytes,
    own_cpu_ms,
    percentile,
    processes,
    rss_mb,
)
from bench.peer_openenv import VERSION, OpenEnvProxy
from tests.gateway_process import GatewayProcess
from turngate.proxy import wire

WARM_TURNS = 3
COMPARED = ("cpu_ms_per_turn", "p50_overhead_ms", "p99_overhead_ms", "rss_mb_per_session")


@dataclass(frozen=True)
class Mix:
    """What is asked of each system."""

    name: str
    shape: Shape
    texts: Texts
    engines: list[FakeProcess]
    folder: Path
    tokenizer: Path
    tokens_per_s: float
    load_processes: int


@contextlib.contextmanager
def engines(args: argparse.Namespace, shape: Shape, texts: Texts, tokenizer: Path, folder: Path) -> Iterator[Any]:
    """So many fake engines that have read all messages once."""
    said = warming(shape, texts)
    fake = functools.partial(fake_engine, tokenizer, fillers(texts), folder, intervals=not args.no_interval)

    def read(engine: FakeProcess) -> None:
        with httpx.Client(timeout=120, trust_env=False) as client:
            for messages in said:
                body = {"model": "fake", "messages": messages, "tools": TOOLS}
                client.post(f"{engine.url}/v1/chat/completions/render", json=body).raise_for_status()

    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(fake(tokens_per_s=args.tokens_per_s)) for _ in range(args.engines)]
        with ThreadPoolExecutor(args.engines) as pool:
            list(pool.map(read, found))
        yield found


def _generation(turn: str) -> str:
    """The engine's name of the generation of an answer of the gateway's."""
    return turn.replace("chatcmpl", "generate-tokens", 1)


def load(mix: Mix, agents: list[tuple[str, str]], pid: int) -> dict[str, Any]:
    """All agents to their end, measured from outside the process `pid`."""
    shape, total = mix.shape, mix.shape.sessions * mix.shape.turns
    marks: list[float] = []

    def on_turn(count: int) -> None:
        if count * 4 // total > len(marks):
            marks.append(cpu_ms(pid))

    spread_s = ANSWER_TOKENS / mix.tokens_per_s
    found = parts(agents, shape, mix.texts, "agent", spread_s, min(mix.load_processes, len(agents)))
    cpu_before, rss_before, waited_before = cpu_ms(pid), rss_mb(pid), core_wait_ms(pid)
    each_before = {one: own_cpu_ms(one) for one in processes(pid)}
    engine_before = [cpu_ms(one.pid) for one in mix.engines]
    played = play(found, on_turn)
    rss, cpu, waited = rss_mb(pid) - rss_before, cpu_ms(pid) - cpu_before, core_wait_ms(pid) - waited_before
    each = [own_cpu_ms(one) - each_before.get(one, 0.0) for one in processes(pid)]
    engine = [cpu_ms(one.pid) - before for one, before in zip(mix.engines, engine_before, strict=True)]
    seen, wall_s, turns = played.seen, played.wall_s, len(played.seen.wall_s)
    took, intervals = engine_times(mix.engines)
    own_s = {turn: took[turn] if turn in took else took[_generation(turn)] for turn in seen.wall_s}
    overhead_ms = [(wall - own_s[turn]) * 1e3 for turn, wall in seen.wall_s.items()]
    quarters = [(after - before) * 4 / turns for before, after in zip([cpu_before, *marks], marks, strict=False)]
    cores = {"gateway": max(each) / 1e3, "engine": max(engine) / 1e3, "load": max(played.cpu_s)}
    return {
        "cpu_ms_per_turn": round(cpu / turns, 2),
        "turns_per_s": round(turns / wall_s, 1),
        "turns_per_s_steady": round(steady(seen.ended_s), 1),
        "turns_per_s_per_core": round(1000 * turns / cpu, 1),
        "p50_overhead_ms": round(statistics.median(overhead_ms), 1),
        "p99_overhead_ms": round(percentile(overhead_ms, 0.99), 1),
        "core_wait_ms_per_turn": round(waited / turns, 1),
        "rss_mb_per_session": round(rss / shape.sessions, 3),
        "rss_mb": round(rss_before + rss, 1),
        "cpu_ms_quarters": [round(one, 2) for one in quarters],
        "last_over_first": round(quarters[-1] / quarters[0], 3) if quarters and quarters[0] else None,
        "turns": turns,
        "sessions": shape.sessions,
        "wall_s": round(wall_s, 1),
        "streamed_share": round(seen.streamed / turns, 3),
        "tool_share": round(seen.tool_turns / turns, 3),
        "answer_tokens_mean": round(seen.answer_tokens / turns, 1),
        "prompt_tokens_mean": round(seen.prompt_tokens / turns),
        "stream_intervals": dict(sorted(intervals.items(), key=lambda one: int(one[0]))),
        "engine_cores": round(sum(engine) / 1e3 / wall_s, 2),
        "load_cores": round(sum(played.cpu_s) / wall_s, 2),
        "busiest_cores": {name: round(cpu_s / wall_s, 2) for name, cpu_s in cores.items()},
        "engine_late_ms_p50": round(
            statistics.median(own_s.values()) * 1e3 - (seen.answer_tokens / turns - 1) / mix.tokens_per_s * 1e3,
            1,
        ),
        "load_average": os.getloadavg()[0],
        "cores": os.cpu_count(),
    }


def engine_times(engines: list[FakeProcess]) -> tuple[dict[str, float], dict[str, int]]:
    """How long each turn took in the engines, in s, and how often each `stream_interval` was asked for."""
    took: dict[str, float] = {}
    intervals: dict[str, int] = {}
    for one in engines:
        times = httpx.get(f"{one.url}/fake/times", timeout=60, trust_env=False).json()
        took |= times["took_s"]
        for interval, count in times["intervals"].items():
            intervals[interval] = intervals.get(interval, 0) + count
    return took, intervals


def steady(ended_s: list[float]) -> float:
    """Turns a second while all are at work: between the first fifth of the turns and the last one."""
    ordered = sorted(ended_s)
    start, end = len(ordered) // 5, len(ordered) * 4 // 5
    return (end - start) / max(ordered[end] - ordered[start], 1e-9)


def turngate(mix: Mix, workers: int, watch: bool) -> dict[str, Any]:
    """One run through the gateway; a small one goes before it, to warm up."""
    store, stalls = mix.folder / f"store-{workers}", mix.folder / "stalls.jsonl"
    more = [part for one in mix.engines[1:] for part in ("--engine", one.url)]
    options = ("--log-level", "info", "--workers", str(workers), "--tokenizer", str(mix.tokenizer))
    process = Gateway(mix.engines[0].url, store, *options, *more)
    if watch:
        process.watch(stalls)
    with process as gateway:
        gateway.stop()
        empty_bytes = folder_bytes(store)
        gateway.start()
        assert gateway.process is not None
        warm = replace(mix.shape, sessions=2 * workers, turns=min(WARM_TURNS, mix.shape.turns))
        asyncio.run(all_at_once(gateway.endpoints(warm.sessions), warm, mix.texts, Seen(), "warm"))
        stalls.unlink(missing_ok=True)
        before = gateway.client.status()
        agents = gateway.endpoints(mix.shape.sessions)
        found = load(mix, agents, gateway.process.pid)
        status = gateway.client.status()
    continued = max(found["turns"] - mix.shape.sessions, 1)
    found |= {
        "store_bytes_per_turn": round((folder_bytes(store) - empty_bytes) / status.turns),
        "spliced_share": round((status.spliced - before.spliced) / continued, 4),
        "breaks": status.breaks,
        "store_file_system": file_system(mix.folder),
    }
    if watch:
        found["loop"] = loop_summary(stalls)
    return {"system": "turngate", "workers": workers, **found}


def loop_summary(stalls: Path) -> dict[str, Any]:
    """What held the event loop, of the lines that `watched_gateway.py` wrote."""
    held = [json.loads(line) for line in stalls.read_text().splitlines()] if stalls.exists() else []
    held.sort(key=lambda one: -one["own_ms"])
    return {
        "late_over_50_ms": len(held),
        "blocked_over_50_ms": sum(one["own_ms"] > 50 for one in held),
        "longest_late_ms": max((one["late_ms"] for one in held), default=0.0),
        "longest_own_ms": max((one["own_ms"] for one in held), default=0.0),
        "longest_cpu_ms": max((one["cpu_ms"] for one in held), default=0.0),
        "worst": held[:3],
    }


class Gateway(GatewayProcess):
    """The gateway, with sessions as the load wants them."""

    def watch(self, stalls: Path) -> None:
        """Start it with its event loop watched; stalls go to a file. One worker only."""
        self._command[1:3] = [str(ROOT / "bench" / "watched_gateway.py"), str(stalls)]

    def endpoints(self, count: int) -> list[tuple[str, str]]:
        """New sessions: base URL and key of each."""
        new = wire.NewRollout(task="load")
        return [(one.base_url, one.api_key) for one in (self.client.create_rollout(new) for _ in range(count))]


def openenv(mix: Mix) -> dict[str, Any]:
    """The same through OpenEnv's proxy."""
    with OpenEnvProxy([one.url for one in mix.engines], mix.folder) as proxy:
        warm = replace(mix.shape, sessions=2, turns=min(WARM_TURNS, mix.shape.turns))
        asyncio.run(all_at_once(proxy.endpoints(warm.sessions), warm, mix.texts, Seen(), "warm"))
        agents = proxy.endpoints(mix.shape.sessions)
        found = load(mix, agents, proxy.process.pid)
        linked = proxy.linked([key for _, key in agents])
    found.pop("stream_intervals")
    return {
        "system": f"openenv {VERSION}",
        **found,
        "linked_share": round(linked / max(found["turns"] - mix.shape.sessions, 1), 4),
    }


def median(values: list[Any]) -> Any:
    """The median of numbers, the last of anything else."""
    return statistics.median(values) if all(isinstance(one, int | float) for one in values) else values[-1]


def scaling(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the number of processes changes, and the turns a second by those with the first number."""
    kept = ("workers", "turns_per_s_steady", "cpu_ms_per_turn", "p50_overhead_ms", "p99_overhead_ms")
    kept = (*kept, "rss_mb_per_session", "spliced_share", "busiest_cores")
    first = results[0]["turns_per_s_steady"]
    return [
        {key: one[key] for key in kept} | {"over_first": round(one["turns_per_s_steady"] / first, 2)} for one in results
    ]


def run(args: argparse.Namespace, shape: Shape, tokenizer: Path, folder: Path) -> dict[str, Any]:
    """Every system that was asked for, one after another before the same engines; prints each run."""
    modules = (argparse, ast, tarfile, typing, email.message)
    texts = Texts(Tokenizer.from_file(str(tokenizer / "tokenizer.json")), modules)

    def told(found: dict[str, Any]) -> dict[str, Any]:
        print(json.dumps({"shape": args.shape, **found}), flush=True)
        return found

    def laps(measure: typing.Callable[[Mix], dict[str, Any]]) -> dict[str, Any]:
        found = []
        for lap in range(args.laps):
            with (
                tempfile.TemporaryDirectory(dir=folder, prefix=f"lap-{lap}-") as own,
                engines(args, shape, texts, tokenizer, Path(own)) as engined,
            ):
                pace, spread = args.tokens_per_s, args.load_processes
                found.append(told(measure(Mix(args.shape, shape, texts, engined, Path(own), tokenizer, pace, spread))))
        return {key: median([one[key] for one in found]) for key in found[0]}

    watch = args.watch_loop or args.shape == "huge"
    results = [
        laps(lambda mix, workers=workers: turngate(mix, workers, watch and workers == 1))  # type: ignore[misc]
        for workers in map(int, args.workers.split(","))
    ]
    last = {"shape": args.shape, "laps": args.laps, **results[0]}
    if len(results) > 1:
        last["by_workers"] = scaling(results)
    if args.idle:
        last["idle"] = [
            idle_sessions.measure(args.idle, workers, 300, tokenizer) for workers in map(int, args.workers.split(","))
        ]
    if args.peer == "openenv":
        peer = laps(openenv)
        last["peer"] = peer
        last["peer_over_turngate"] = {
            key: round(peer[key] / results[0][key], 1) if results[0][key] > 0 else None for key in COMPARED
        }
    return last


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="short")
    parser.add_argument("--sessions", type=int, help="conversations at once; default: the shape's")
    parser.add_argument("--turns", type=int, help="turns of each; default: the shape's. Prompts keep the shape's sizes")
    parser.add_argument("--tokenizer", type=Path, help="model folder for the fake engine; default: the embedded Qwen")
    parser.add_argument("--folder", type=Path, help="where the store goes, on a disk; default: beside this file")
    parser.add_argument("--laps", type=int, default=1, help="whole runs; the last line then holds the medians")
    parser.add_argument("--workers", default="1", help="gateway processes; several counts as 1,2 run one after another")
    parser.add_argument("--engines", type=int, default=2, help="fake engines, each a process")
    parser.add_argument("--tokens-per-s", type=float, default=TOKENS_PER_S, help="of each session; default: 100")
    parser.add_argument("--load-processes", type=int, default=1, help="processes of agents; more than one: no quarters")
    parser.add_argument("--no-interval", action="store_true", help="engines that ignore stream_interval")
    parser.add_argument("--watch-loop", action="store_true", help="what holds the event loop; always for huge")
    parser.add_argument("--idle", type=int, default=0, help="also: what so many idle sessions cost")
    parser.add_argument("--peer", choices=["openenv"], help="another proxy on the same mix")
    parser.add_argument("--out", type=Path, help="a file for the last line too")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started ends too
    shape = SHAPES[args.shape]
    shape = replace(shape, sessions=args.sessions or shape.sessions, turns=args.turns or shape.turns)
    tokenizer = args.tokenizer
    if tokenizer is None:
        from turngate.trainer.models import resolve_model

        tokenizer = Path(resolve_model("qwen-coder-0.5b"))
    with tempfile.TemporaryDirectory(dir=args.folder or Path(__file__).parent, prefix=".gateway-") as folder:
        last = run(args, shape, tokenizer, Path(folder))
    if args.out:
        args.out.write_text(json.dumps(last, indent=1) + "\n")
    print(json.dumps(last))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
