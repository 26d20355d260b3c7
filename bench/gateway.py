#!/usr/bin/env python3
"""What a turn costs the gateway, under many agents at once; the engine is the tests' fake, at 100 tokens/s a session.

    python bench/gateway.py --shape short        # 16 sessions of 20 turns, prompts of 2k -> 18k tokens
    python bench/gateway.py --shape long         # 32 sessions of 40 turns, prompts of 16k -> 52k tokens
    python bench/gateway.py --workers 1,2        # the same mix with each number of gateway processes

Agents (this process), engine and gateway are separate processes. 200 tokens a turn, one in each event of the engine;
half of the sessions stream, about half of the answers call a tool. CPU is user and system time of all the gateway's
processes, from /proc. The store is on a disk, with the default durability. The last line is one JSON object:

    cpu_ms_per_turn, turns_per_s_per_core   CPU of the gateway, and its inverse
    p50_overhead_ms, p99_overhead_ms        the agent's wall time less the engine's own time for that turn
    rss_mb_per_session                      growth of the resident memory, sessions still open
    store_bytes_per_turn                    growth of the store's folder, after the gateway has ended
    spliced_share                           of all turns but the first of each session: must be 1.0
    turns_per_s                             of all agents together, as fast as they asked

Overheads include what these three processes do to each other where they share cores.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import contextlib
import email.message
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import typing
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.agent_load import SHAPES, TOKENS_PER_S, Seen, Shape, Texts, all_at_once, fillers
from tests.gateway_process import GatewayProcess, free_port

_TICK_MS = 1000 / os.sysconf("SC_CLK_TCK")
_PAGE_MB = os.sysconf("SC_PAGE_SIZE") / 1e6


def processes(root: int) -> list[int]:
    """`root` and all processes below it."""
    found = [root]
    for task in Path(f"/proc/{root}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += processes(int(child))
    return found


def cpu_ms(root: int) -> float:
    """User and system time of a process and those below it, ended children included, in ms (ticks of 10 ms)."""
    ticks = 0
    for pid in processes(root):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += sum(int(one) for one in fields[11:15])
    return ticks * _TICK_MS


def rss_mb(root: int) -> float:
    """Resident memory of a process and those below it, in MB."""
    return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_MB for pid in processes(root))


def folder_bytes(folder: Path) -> int:
    """Size of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def file_system(folder: Path) -> str:
    """The type of the file system that a folder is on, from /proc/mounts."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    above = {str(folder.resolve()), *map(str, folder.resolve().parents)}
    return max((len(point), kind) for point, kind in mounts if point in above)[1]


@contextlib.contextmanager
def fake_engine(
    tokenizer: Path, texts: Texts, folder: Path, *, tokens_per_s: float = TOKENS_PER_S, keep_times: bool = True
) -> Iterator[str]:
    """A fake engine in a process of its own; gives its URL."""
    said = folder / "answers.json"
    said.write_text(json.dumps(fillers(texts)))
    port = free_port()
    command = [sys.executable, "-m", "tests.fake_engine", "--port", str(port), "--tokenizer", str(tokenizer)]
    command += ["--tokens-per-s", str(tokens_per_s), "--chunk", "1", "--max-model-len", "131072"]
    command += ["--fillers", str(said), *(["--keep-times"] if keep_times else [])]
    process = subprocess.Popen(command, cwd=Path(__file__).resolve().parent.parent)
    url = f"http://127.0.0.1:{port}"
    try:
        while process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                    break
            time.sleep(0.1)
        else:
            raise RuntimeError(f"the fake engine ended with {process.returncode}")
        yield url
    finally:
        process.terminate()
        process.wait(timeout=30)


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` of the values lie (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def median(values: list[Any]) -> Any:
    """The median of numbers, the last of anything else."""
    return statistics.median(values) if all(isinstance(one, int | float) for one in values) else values[-1]


def run_agents(gateway: GatewayProcess, shape: Shape, texts: Texts, label: str) -> Seen:
    """`shape.sessions` agents on sessions of their own, to their end."""
    opened = [gateway.session()[0] for _ in range(shape.sessions)]
    return asyncio.run(all_at_once([(one.base_url, one.api_key) for one in opened], shape, texts, label=label))


def measure(shape: Shape, tokenizer: Path, folder: Path, workers: int = 1) -> dict[str, Any]:
    """One run of one shape; a small one goes before it, to warm up."""
    texts = Texts(
        Tokenizer.from_file(str(tokenizer / "tokenizer.json")), (argparse, ast, tarfile, typing, email.message)
    )
    store = folder / "store"
    with fake_engine(tokenizer, texts, folder) as engine:
        with GatewayProcess(engine, store, "--log-level", "info", "--workers", str(workers)) as gateway:
            gateway.stop()
            empty_bytes = folder_bytes(store)
            gateway.start()
            assert gateway.process is not None
            pid = gateway.process.pid
            run_agents(gateway, replace(shape, sessions=2, turns=3), texts, "warm")
            before, cpu_before, rss_before = gateway.client.status(), cpu_ms(pid), rss_mb(pid)
            begun_s = time.perf_counter()
            seen = run_agents(gateway, shape, texts, "agent")
            wall_s, cpu, rss = time.perf_counter() - begun_s, cpu_ms(pid) - cpu_before, rss_mb(pid) - rss_before
            status = gateway.client.status()
        stored_bytes = (folder_bytes(store) - empty_bytes) / status.turns
        took = httpx.get(f"{engine}/fake/times", trust_env=False).json()
    turns = len(seen.wall_s)
    overhead_ms = [(wall - took[f"generate-tokens-{turn}"]) * 1e3 for turn, wall in seen.wall_s.items()]
    return {
        "workers": workers,
        "cpu_ms_per_turn": round(cpu / turns, 2),
        "turns_per_s": round(turns / wall_s, 1),
        "turns_per_s_per_core": round(1000 * turns / cpu, 1),
        "p50_overhead_ms": round(statistics.median(overhead_ms), 1),
        "p99_overhead_ms": round(percentile(overhead_ms, 0.99), 1),
        "rss_mb_per_session": round(rss / shape.sessions, 2),
        "store_bytes_per_turn": round(stored_bytes),
        "spliced_share": round((status.spliced - before.spliced) / max(turns - shape.sessions, 1), 4),
        "turns": turns,
        "sessions": shape.sessions,
        "breaks": status.breaks,
        "wall_s": round(wall_s, 1),
        "streamed_share": round(seen.streamed / turns, 3),
        "tool_share": round(seen.tool_turns / turns, 3),
        "answer_tokens_mean": round(seen.answer_tokens / turns, 1),
        "prompt_tokens_mean": round(seen.prompt_tokens / turns),
        "engine_late_ms_p50": round(
            statistics.median(took[f"generate-tokens-{turn}"] for turn in seen.wall_s) * 1e3
            - (seen.answer_tokens / turns - 1) / TOKENS_PER_S * 1e3,
            1,
        ),
        "load_average": os.getloadavg()[0],
        "cores": os.cpu_count(),
        "store_file_system": file_system(folder),
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="short")
    parser.add_argument("--sessions", type=int, help="conversations at once; default: the shape's")
    parser.add_argument("--turns", type=int, help="turns of each; default: the shape's. Prompts keep the shape's sizes")
    parser.add_argument("--tokenizer", type=Path, help="model folder for the fake engine; default: the embedded Qwen")
    parser.add_argument("--folder", type=Path, help="where the store goes, on a disk; default: beside this file")
    parser.add_argument("--laps", type=int, default=1, help="whole runs; the last line then holds the medians")
    parser.add_argument("--workers", default="1", help="gateway processes; several counts as 1,2 run one after another")
    args = parser.parse_args()
    counts = [int(one) for one in args.workers.split(",")]
    shape = SHAPES[args.shape]
    shape = replace(shape, sessions=args.sessions or shape.sessions, turns=args.turns or shape.turns)
    tokenizer = args.tokenizer
    if tokenizer is None:
        from turngate.trainer.models import resolve_model

        tokenizer = Path(resolve_model("qwen-coder-0.5b"))
    results = []
    for workers in counts:
        laps = []
        for _ in range(args.laps):
            with tempfile.TemporaryDirectory(dir=args.folder or Path(__file__).parent, prefix=".gateway-") as folder:
                laps.append(measure(shape, tokenizer, Path(folder), workers))
                print(json.dumps({"shape": args.shape, **laps[-1]}), flush=True)
        middle = {key: median([lap[key] for lap in laps]) for key in laps[0]}
        results.append({"shape": args.shape, "laps": args.laps, **middle})
        if args.laps > 1:
            print(json.dumps(results[-1]), flush=True)
    if len(counts) > 1:
        print(json.dumps({**results[0], "by_workers": [scaling(one) for one in results]}))
    return 0


def scaling(result: dict[str, Any]) -> dict[str, Any]:
    """What the number of processes changes, of one result."""
    kept = ("workers", "turns_per_s", "cpu_ms_per_turn", "p50_overhead_ms", "p99_overhead_ms", "rss_mb_per_session")
    return {key: result[key] for key in kept}


if __name__ == "__main__":
    raise SystemExit(main())
