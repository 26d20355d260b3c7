#!/usr/bin/env python3
"""One of two real vLLM engines is killed under load and started again: what do the agents see of it?

    python bench/failover.py --tokenizer FOLDER [--agents 6] [--turns 6] [--answer-tokens 256]

Two vLLM servers of a tiny model with random weights (`tiny_model.py`), CPU or GPU. Three parts, each with a gateway
and a store of its own: the same conversations on one engine, on two, and on two of which one is killed in the middle
of its streams; there the agents go on until the killed one is back and has answered again. In the last part half of
the agents sample with an adapter, half with a seed. The last line is one JSON object:

    client_errors            requests that failed, and streams whose text is not the recorded answer: must be 0
    continued_turns          turns begun on one engine and ended on another or the restarted one
    seam_repeats             continued turns whose first token after the seam is their very first one
    breaks                   turns that did not continue their session's tokens: must be 0
    adapter_turns_after      turns with the adapter on the engine after its restart: it had it again
    lost_adapters            turns that engine refused for want of its adapter: must be 0
    hit_share_one, hit_share_two, hit_share_killed   tokens of prompts found in the engines' prefix caches: with two
                             within 5 points of one, also where one of the two is killed (there more is no fault, since
                             its agents go on for longer); killed and restarted engine both counted
    hit_share_survivor       of the engine that was not killed alone, where one was
    store_verified           `turngate verify` finds nothing wrong in all three stores
    problems                 what of the above is not as it must be, in words; the exit status is 1 with any
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.tiny_model import make_tiny
from tests.engines import RealEngine, vllm_server
from tests.gateway_process import GatewayProcess
from turngate.proxy import wire
from turngate.proxy.store.turnstore import TurnStore
from turngate.proxy.turns import Turn

_COUNTERS = re.compile(r"^vllm:prefix_cache_(hits|queries)(?:_total)?\{[^}]*\} (\S+)", re.MULTILINE)
_WORDS = "the gateway keeps exact tokens of every turn and an engine may die at any time without an agent seeing it "
_POINTS = 0.05
"""How far the share of prompts found in the caches may be from a single engine's."""

ENGINE_ARGS = ("--block-size", "32", "--enforce-eager")
ENGINE_ENV = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_SERVER_DEV_MODE": "1"}


@dataclass
class Seen:
    """What the agents saw, over all of them."""

    turns: int = 0
    errors: list[str] = field(default_factory=list)
    texts: dict[str, list[str]] = field(default_factory=dict)
    streaming: int = 0


@dataclass(frozen=True)
class Load:
    """How much the agents do; a turn adds about 90 prompt tokens and `answer_tokens`."""

    agents: int
    turns: int
    answer_tokens: int


async def agent(gateway: GatewayProcess, number: int, load: Load, seen: Seen, on: Callable[[], bool]) -> None:
    """One conversation, streamed; anew while `on()`, which ends after a whole one otherwise."""
    while True:
        seed = {"seed": number} if number % 2 else {}
        new = wire.NewRollout(task="failover", sampling={"temperature": 1.0, **seed})
        created = await asyncio.to_thread(gateway.client.create_rollout, new)
        client = openai.AsyncOpenAI(
            base_url=created.base_url, api_key=created.api_key, max_retries=0, timeout=600, http_client=None
        )
        said = seen.texts.setdefault(created.id, [])
        messages: list[Any] = [{"role": "system", "content": _WORDS * 20}]
        for turn in range(load.turns):
            messages.append({"role": "user", "content": f"Agent {number}, step {turn}: {_WORDS * 4}"})
            try:
                text = await _answer(client, messages, load, seen)
            except openai.OpenAIError as error:
                seen.errors.append(repr(error))
                break
            said.append(text)
            seen.turns += 1
            messages.append({"role": "assistant", "content": text})
        await client.close()
        if not on():
            return


async def _answer(client: openai.AsyncOpenAI, messages: list[Any], load: Load, seen: Seen) -> str:
    text, finish = "", None
    stream = await client.chat.completions.create(
        model="m", messages=messages, stream=True, max_tokens=load.answer_tokens
    )
    seen.streaming += 1
    try:
        async for event in stream:
            for choice in event.choices:
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
    finally:
        seen.streaming -= 1
    if finish is None:
        raise openai.OpenAIError("the stream ended without a finish reason")
    return text


def cache_counters(engines: list[RealEngine]) -> dict[str, float]:
    """Tokens looked up and found in the prefix caches, summed."""
    out = {"hits": 0.0, "queries": 0.0}
    for engine in engines:
        text = httpx.get(f"{engine.url}/metrics", trust_env=False).text
        for name, value in _COUNTERS.findall(text):
            out[name] += float(value)
    return out


def wait_until_free(port: int, limit_s: float = 60.0) -> None:
    """A killed engine's sockets live on for a moment. Raises OSError after `limit_s`."""
    until_s = time.monotonic() + limit_s
    while True:
        try:
            socket.create_server(("127.0.0.1", port)).close()
            return
        except OSError:
            if time.monotonic() > until_s:
                raise
        time.sleep(0.1)


def models(engine: RealEngine) -> list[str]:
    """What an engine serves: the model and its adapters."""
    return [one["id"] for one in httpx.get(f"{engine.url}/v1/models", trust_env=False).json()["data"]]


def hit_share(*readings: tuple[dict[str, float], dict[str, float]]) -> float:
    """Of the tokens looked up between each pair of readings, the share that was found."""
    hits, queries = (sum(after[key] - before[key] for before, after in readings) for key in ("hits", "queries"))
    return round(hits / max(1.0, queries), 4)


def turns_of(gateway: GatewayProcess) -> list[Turn]:
    """All turns of a gateway's store."""
    with TurnStore(gateway.store / "turns-0.sqlite", readonly=True) as store:
        return [turn for rollout in store.rollouts() for turn in store.turns(rollout)]


def verified(gateway: GatewayProcess) -> bool:
    """Whether `turngate verify` finds nothing wrong."""
    command = [sys.executable, "-m", "turngate.proxy.cli", "verify", str(gateway.store)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def mismatched(turns: list[Turn], seen: Seen) -> int:
    """Streams whose text is not the recorded answer."""
    recorded: dict[str, list[str]] = {}
    for turn in turns:
        recorded.setdefault(turn.rollout, []).append(str(turn.response.get("content") or ""))
    return sum(
        one != other
        for rollout, texts in seen.texts.items()
        for one, other in zip(texts, recorded.get(rollout, [""] * len(texts)), strict=False)
    )


def calm(gateway: GatewayProcess, engines: list[RealEngine], load: Load) -> dict[str, Any]:
    """The conversations with nothing going wrong."""
    seen, before = Seen(), cache_counters(engines)

    async def all_agents() -> None:
        await asyncio.gather(*(agent(gateway, i, load, seen, lambda: False) for i in range(load.agents)))

    asyncio.run(all_agents())
    turns = turns_of(gateway)
    return {
        "errors": [*seen.errors, *["text differs"] * mismatched(turns, seen)],
        "turns": seen.turns,
        "breaks": sum(turn.kind == "break" for turn in turns),
        "hit_share": hit_share((before, cache_counters(engines))),
        "engines": sorted({turn.engine for turn in turns}),
        "verified": verified(gateway),
    }


async def _killed(
    gateway: GatewayProcess, engines: list[RealEngine], load: Load, adapter: Path, restart: Callable[[], RealEngine]
) -> tuple[Seen, dict[str, Any]]:
    seen, going = Seen(), True
    half = load.agents // 2
    agents = [asyncio.create_task(agent(gateway, i, load, seen, lambda: going)) for i in range(half)]
    new = wire.PublishAdapter(policy="policy", path=str(adapter), step=1)
    while not seen.turns:
        await asyncio.sleep(0.05)
    await asyncio.to_thread(gateway.client.publish_adapter, new)  # the other half samples with it
    agents += [asyncio.create_task(agent(gateway, i, load, seen, lambda: going)) for i in range(half, load.agents)]
    while seen.turns < 2 * load.agents or seen.streaming < load.agents - 1:
        await asyncio.sleep(0.02)
    until_kill = await asyncio.to_thread(cache_counters, engines[:1])
    engines[0].kill()
    killed_s, at = time.monotonic(), seen.turns
    engine = await asyncio.to_thread(restart)
    up_s, up_at = time.monotonic(), seen.turns
    before = {turn.id for turn in await asyncio.to_thread(turns_of, gateway)}
    while not (
        after := [
            t for t in await asyncio.to_thread(turns_of, gateway) if t.id not in before and _on_adapter(t, "engine-0")
        ]
    ):
        await asyncio.sleep(1.0)
        if time.monotonic() - up_s > 300:
            break
    going = False
    await asyncio.gather(*agents)
    loaded = await asyncio.to_thread(models, engine)
    facts = {
        "down_s": round(up_s - killed_s, 1),
        "turns_while_down": up_at - at,
        "first_turn_after_s": round(time.monotonic() - up_s, 1) if after else None,
        "loaded_after": loaded[1:],
        "killed_engine": [until_kill, await asyncio.to_thread(cache_counters, [engine])],
    }
    return seen, facts


def _on_adapter(turn: Turn, engine: str) -> bool:
    return turn.engine == engine and any(span.adapter for span in turn.spans)


def killed(
    gateway: GatewayProcess, engines: list[RealEngine], load: Load, adapter: Path, restart: Callable[[], RealEngine]
) -> dict[str, Any]:
    """The conversations, with one engine killed and started again meanwhile."""
    known = {turn.id for turn in turns_of(gateway)}
    begun, before = cache_counters(engines[:1]), cache_counters(engines[1:])
    seen, facts = asyncio.run(_killed(gateway, engines, load, adapter, restart))
    after = cache_counters(engines[1:])
    until_kill, since_restart = facts.pop("killed_engine")
    everywhere = [(begun, until_kill), ({"hits": 0.0, "queries": 0.0}, since_restart), (before, after)]
    turns = [turn for turn in turns_of(gateway) if turn.id not in known]
    continued = [turn for turn in turns if len(turn.spans) > 1]
    lost = gateway.log.read_text().count("does not exist")
    return facts | {
        "errors": [*seen.errors, *["text differs"] * mismatched(turns, seen)],
        "turns": seen.turns,
        "continued_turns": len(continued),
        "continued_with_adapter": sum(turn.spans[0].adapter is not None for turn in continued),
        "seam_repeats": sum(
            int(turn.completion_ids[turn.spans[1].start]) == int(turn.completion_ids[0]) for turn in continued
        ),
        "breaks": sum(turn.kind == "break" for turn in turns),
        "adapter_turns_after": sum(_on_adapter(turn, "engine-0") for turn in turns),
        "lost_adapters": lost,
        "hit_share": hit_share(*everywhere),
        "hit_share_of_survivor": hit_share((before, after)),
        "verified": verified(gateway),
    }


def measure(tokenizer: Path, folder: Path, load: Load) -> dict[str, Any]:
    """All three parts."""
    make_tiny(tokenizer, folder / "tiny", folder / "lora")
    with ExitStack() as stack:
        # An engine dies with the thread that started it, so these threads live until all is over.
        pool = stack.enter_context(ThreadPoolExecutor(2))

        def start(number: int, port: int = 0) -> RealEngine:
            server = vllm_server(folder / "tiny", folder / f"engine-{number}.log", *ENGINE_ARGS, port=port)
            return stack.enter_context(server)

        engines = list(pool.map(start, (0, 1)))

        def start_again() -> RealEngine:
            port = int(engines[0].url.rpartition(":")[2])
            wait_until_free(port)
            return start(0, port)

        with GatewayProcess(engines[0].url, folder / "one") as gateway:
            one = calm(gateway, engines[:1], load)
        print(f"one engine: {json.dumps(one)}", flush=True)
        for engine in engines:
            httpx.post(f"{engine.url}/reset_prefix_cache", trust_env=False)
        with GatewayProcess(engines[0].url, folder / "two", "--engine", engines[1].url) as gateway:
            two = calm(gateway, engines, load)
        print(f"two engines: {json.dumps(two)}", flush=True)
        with GatewayProcess(engines[0].url, folder / "killed", "--engine", engines[1].url) as gateway:
            third = killed(gateway, engines, load, folder / "lora", lambda: pool.submit(start_again).result())
        print(f"one of two killed: {json.dumps(third)}", flush=True)
    errors = [*one["errors"], *two["errors"], *third["errors"]]
    for error in errors[:5]:
        print(error, flush=True)
    found = {
        "client_errors": len(errors),
        "turns": one["turns"] + two["turns"] + third["turns"],
        **{key: third[key] for key in ("continued_turns", "continued_with_adapter", "seam_repeats")},
        **{key: third[key] for key in ("adapter_turns_after", "lost_adapters", "turns_while_down", "down_s")},
        "breaks": one["breaks"] + two["breaks"] + third["breaks"],
        "hit_share_one": one["hit_share"],
        "hit_share_two": two["hit_share"],
        "hit_share_killed": third["hit_share"],
        "hit_share_survivor": third["hit_share_of_survivor"],
        "store_verified": one["verified"] and two["verified"] and third["verified"],
    }
    return found | {"problems": problems(found)}


def problems(found: dict[str, Any]) -> list[str]:
    """What a run's figures show that must not be, in words; empty when all is well."""
    out = [f"{key} is {found[key]}, not 0" for key in ("client_errors", "breaks", "lost_adapters") if found[key]]
    for key in ("continued_turns", "continued_with_adapter", "adapter_turns_after", "turns_while_down"):
        if not found[key]:
            out.append(f"{key} is 0, so the run shows nothing of it")
    one = found["hit_share_one"]
    if abs(found["hit_share_two"] - one) > _POINTS:
        out.append(f"two engines found {found['hit_share_two']:.1%} of prompts in their caches, a single one {one:.1%}")
    if found["hit_share_killed"] < one - _POINTS:
        out.append(
            f"with one of two killed {found['hit_share_killed']:.1%} was found in caches, with a single one {one:.1%}"
        )
    if not found["store_verified"]:
        out.append("`turngate verify` finds something wrong")
    return out


def main() -> int:
    """Run and print; 1 where something is not as it must be."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokenizer", type=Path, required=True, help="model folder whose tokenizer and template to use"
    )
    parser.add_argument("--agents", type=int, default=6)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--answer-tokens", type=int, default=256)
    parser.add_argument("--folder", type=Path, help="keep models, logs and stores here")
    args = parser.parse_args()
    os.environ.update({name: os.environ.get(name, value) for name, value in ENGINE_ENV.items()})
    with tempfile.TemporaryDirectory() as made:
        found = measure(args.tokenizer, args.folder or Path(made), Load(args.agents, args.turns, args.answer_tokens))
    print(json.dumps(found))
    return 1 if found["problems"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
