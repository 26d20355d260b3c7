#!/usr/bin/env python3
"""What a turn costs vLLM's API server, with the gateway in front of it and without: cost that only moves is no gain.

    python bench/engine_cost.py --tokenizer FOLDER [--sessions 4] [--turns 6] [--laps 1]

A real vLLM with a tiny random model (`tiny_model.py`; hermes as its tool parser), CPU or GPU. The same conversations,
half of them streamed, go to it in three ways, one after another in each lap: `plain`, agents ask it for chat
completions; `captured`, with `return_token_ids` and `logprobs` too, which a proxy that records tokens must ask for;
`gateway`, agents ask the gateway, which renders, generates and derenders there. CPU is that of the API server's process
alone, which templates, tokenises, parses and speaks HTTP; the engine's core has its own. The last line is one JSON
object: for each way `api_server_ms_per_turn`, `engine_core_ms_per_turn`, and for the gateway its own; `idle_ms_per_s`,
what the API server uses with nobody asking, with and without a gateway that watches it; the ratios of `gateway` to the
two others.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import json
import os
import signal
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.agent_load import Seen, Shape, Texts, all_at_once
from bench.failover import ENGINE_ARGS, ENGINE_ENV
from bench.measuring import cpu_ms, own_cpu_ms
from bench.tiny_model import make_tiny
from tests.engines import RealEngine, vllm_server
from tests.gateway_process import GatewayProcess

PARSER = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
CAPTURING = {"return_token_ids": True, "logprobs": True, "top_logprobs": 0}
IDLE_S = 10.0


def measured(
    engine: RealEngine, agents: Sequence[tuple[str, str]], shape: Shape, texts: Texts, asked: dict[str, Any], lap: str
) -> dict[str, float]:
    """CPU in ms of the API server and of all below it, and the number of turns, of all agents to their end."""
    seen = Seen()
    server, all_of_it = own_cpu_ms(engine.pid), cpu_ms(engine.pid)
    begun_s = time.perf_counter()
    asyncio.run(all_at_once(agents, shape, texts, seen, f"lap {lap}", asked))
    wall_s = time.perf_counter() - begun_s
    server, all_of_it = own_cpu_ms(engine.pid) - server, cpu_ms(engine.pid) - all_of_it
    return {"server": server, "core": all_of_it - server, "turns": len(seen.wall_s), "wall_s": wall_s}


def idle(engine: RealEngine) -> float:
    """CPU of the API server with nobody asking, in ms a second."""
    before = own_cpu_ms(engine.pid)
    time.sleep(IDLE_S)
    return (own_cpu_ms(engine.pid) - before) / IDLE_S


def run(engine: RealEngine, gateway: GatewayProcess, args: argparse.Namespace, tokenizer: Path) -> dict[str, Any]:
    """All laps; a small one goes before them, to warm up."""
    assert gateway.process is not None
    texts = Texts(Tokenizer.from_file(str(tokenizer / "tokenizer.json")), (argparse, ast, tarfile))
    shape = Shape(args.sessions, args.turns, args.first_tokens, args.last_tokens)
    limit = {"max_tokens": args.answer_tokens}
    direct = [(f"{engine.url}/v1", "none")] * shape.sessions
    ways: dict[str, dict[str, Any]] = {
        "plain": {"model": engine.model, **limit},
        "captured": {"model": engine.model, **limit, **CAPTURING},
        "gateway": {"model": "policy", **limit},
    }
    sums: dict[str, dict[str, float]] = {way: {} for way in ways}
    for lap in range(args.laps + 1):
        of = Shape(2, 2, shape.first_tokens, shape.last_tokens) if lap == 0 else shape
        for way, asked in ways.items():
            agents = direct[: of.sessions]
            if way == "gateway":
                opened = [gateway.session()[0] for _ in range(of.sessions)]
                agents = [(one.base_url, one.api_key) for one in opened]
            own = cpu_ms(gateway.process.pid)
            found = measured(engine, agents, of, texts, asked, f"{lap} {way}")
            found["gateway"] = cpu_ms(gateway.process.pid) - own
            print(json.dumps({"lap": lap, "way": way, **found}), flush=True)
            if lap:
                sums[way] = {key: sums[way].get(key, 0.0) + value for key, value in found.items()}
    out: dict[str, Any] = {"turns": sums["plain"]["turns"], "sessions": shape.sessions, "laps": args.laps}
    for way, total in sums.items():
        out[way] = {
            "api_server_ms_per_turn": round(total["server"] / total["turns"], 2),
            "engine_core_ms_per_turn": round(total["core"] / total["turns"], 2),
            "wall_s": round(total["wall_s"], 1),
        }
    out["gateway"]["gateway_ms_per_turn"] = round(sums["gateway"]["gateway"] / sums["gateway"]["turns"], 2)
    for other in ("plain", "captured"):
        ratio = out["gateway"]["api_server_ms_per_turn"] / out[other]["api_server_ms_per_turn"]
        out[f"gateway_over_{other}"] = round(ratio, 3)
    status = gateway.client.status()
    return out | {"spliced": status.spliced, "breaks": status.breaks}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer", type=Path, help="model folder; default: the embedded SmolLM2")
    parser.add_argument("--sessions", type=int, default=4)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--first-tokens", type=int, default=1500, help="size of the first prompt")
    parser.add_argument("--last-tokens", type=int, default=5500, help="size of the last prompt, below 8000")
    parser.add_argument("--answer-tokens", type=int, default=200)
    parser.add_argument("--laps", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a file for the last line too")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started ends too
    tokenizer = args.tokenizer
    if tokenizer is None:
        from turngate.trainer.models import resolve_model

        tokenizer = Path(resolve_model("smollm2-135m"))
    os.environ.update({name: os.environ.get(name, value) for name, value in ENGINE_ENV.items()})
    with tempfile.TemporaryDirectory(prefix="turngate-engine-cost-") as name:
        folder = Path(name)
        make_tiny(tokenizer, folder / "tiny", folder / "lora")
        with vllm_server(folder / "tiny", folder / "engine.log", *ENGINE_ARGS, *PARSER) as engine:
            alone = idle(engine)
            with GatewayProcess(engine.url, folder / "store", "--log-level", "info") as gateway:
                watched = idle(engine)
                last = run(engine, gateway, args, tokenizer)
    last["idle_ms_per_s"] = {"alone": round(alone, 1), "with_gateway": round(watched, 1)}
    last |= {"load_average": os.getloadavg()[0], "cores": os.cpu_count()}
    if args.out:
        args.out.write_text(json.dumps(last, indent=1) + "\n")
    print(json.dumps(last))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
