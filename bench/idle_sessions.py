#!/usr/bin/env python3
"""What idle sessions cost a gateway in memory: each takes its turns, then none does anything.

    python bench/idle_sessions.py --sessions 500 --workers 2
    python bench/idle_sessions.py --sessions 500 --turns 4 --words 4500     # 18,000 tokens each

The engine is the tests' fake, in this process. The last line is one JSON object; memory is of all the gateway's
processes together, in MB: resident before and after, the difference, and the proportional share (shared pages once).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.measuring import processes, rss_mb
from tests.fake_engine.runner import FakeEngine
from tests.gateway_process import GatewayProcess
from turngate.proxy import wire
from turngate.proxy.store.turnstore import TurnStore
from turngate.proxy.vitals import TRIM_S


def pss_mb(root: int) -> float:
    """Proportional share of memory of a process and those below it, in MB."""
    found = 0.0
    for pid in processes(root):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        found += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024 / 1e6
    return found


def measure(sessions: int, workers: int, turns: int, words: int, tokenizer: Path) -> dict[str, Any]:
    """Open the sessions, each with so many turns of so many words, and look at the memory."""
    with (
        tempfile.TemporaryDirectory() as folder,
        FakeEngine(tokenizer) as engine,
        GatewayProcess(engine.url, Path(folder) / "store", "--workers", str(workers)) as gateway,
    ):
        assert gateway.process is not None
        pid = gateway.process.pid
        before = rss_mb(pid)

        def open_one(number: int) -> None:
            created = gateway.client.create_rollout(wire.NewRollout(task="idle"))
            messages: list[Any] = []
            for turn in range(turns):
                text = " ".join(f"{number}-{turn * words + i}" for i in range(words // 4))  # none is like another
                messages.append({"role": "user", "content": text})
                answer = agents.post(f"{created.base_url}/chat/completions", json={"messages": messages})
                messages.append(answer.raise_for_status().json()["choices"][0]["message"])

        with httpx.Client(timeout=120, trust_env=False) as agents, ThreadPoolExecutor(4) as pool:
            list(pool.map(open_one, range(sessions)))
        time.sleep(TRIM_S + 2)  # what is not used is given back by then
        after = rss_mb(pid)
        with TurnStore(gateway.store / "turns-0.sqlite", readonly=True) as store:
            last = store.turns(next(store.rollouts()))[-1]
        return {
            "sessions": sessions,
            "workers": workers,
            "turns": turns,
            "tokens_a_session": last.path_tokens,
            "processes": len(processes(pid)),
            "rss_mb_before": round(before, 1),
            "rss_mb_after": round(after, 1),
            "sessions_cost_mb": round(after - before, 1),
            "pss_mb_after": round(pss_mb(pid), 1),
        }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=int, default=500)
    parser.add_argument("--workers", type=int, default=2, help="gateway processes that serve agents")
    parser.add_argument("--turns", type=int, default=1, help="turns that each session takes")
    parser.add_argument("--words", type=int, default=300, help="size of each message of its user")
    parser.add_argument("--tokenizer", type=Path, help="model folder for the fake engine; default: the embedded Qwen")
    args = parser.parse_args()
    tokenizer = args.tokenizer
    if tokenizer is None:
        from turngate.trainer.models import resolve_model

        tokenizer = Path(resolve_model("qwen-coder-0.5b"))
    print(json.dumps(measure(args.sessions, args.workers, args.turns, args.words, tokenizer)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
