"""The agents' load, measured from outside the gateway: in this process, or spread over several.

One process of agents takes about 4 ms of CPU a turn, as much as a gateway, so that more than one gateway process can
only be kept busy by several. It must never tell less than what was asked for: a load process that fails ends the run.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection

from bench.agent_load import SETS, Seen, Shape, Texts, bodies, some_at_once

READY_S = 120.0


@dataclass(frozen=True)
class Played:
    """What all agents saw, how long it took, and the CPU of each process of theirs in s."""

    seen: Seen
    wall_s: float
    cpu_s: list[float]


@dataclass(frozen=True)
class Part:
    """Agents of one process: (base URL, key) of each, the number of the first, and how many there are in all."""

    agents: Sequence[tuple[str, str]]
    first: int
    total: int
    said: list[list[str]]
    label: str
    spread_s: float


def parts(
    agents: Sequence[tuple[str, str]], shape: Shape, texts: Texts, label: str, spread_s: float, count: int
) -> list[Part]:
    """The agents split into so many neighbourhoods of nearly the same size."""
    said = [bodies(shape, texts, i) for i in range(min(SETS, len(agents)))]
    bounds = [len(agents) * i // count for i in range(count + 1)]
    return [
        Part(agents[start:end], start, len(agents), said, label, spread_s) for start, end in itertools.pairwise(bounds)
    ]


def play(found: Sequence[Part], on_turn: Callable[[int], None] = lambda _: None) -> Played:
    """All parts at once, to their end: one part in this process, which tells `on_turn` of each turn, several in others.

    Raises:
        RuntimeError: a process of agents failed; its own words are on the standard error.
    """
    if len(found) > 1:
        return _in_processes(found)
    seen, own_s, begun_s = Seen(on_turn=on_turn), time.process_time(), time.perf_counter()
    asyncio.run(_agents(found[0], seen))
    return Played(seen, time.perf_counter() - begun_s, [time.process_time() - own_s])


async def _agents(part: Part, seen: Seen) -> None:
    await some_at_once(
        part.agents, part.said, seen, part.label, first=part.first, total=part.total, spread_s=part.spread_s
    )


def _in_processes(found: Sequence[Part]) -> Played:
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in found]
    started = [
        context.Process(target=_play_part, args=(theirs, part), daemon=True)
        for (_, theirs), part in zip(pipes, found, strict=True)
    ]
    for process in started:
        process.start()
    for _, theirs in pipes:
        theirs.close()  # so that an ended process is an end of file here
    ours = [own for own, _ in pipes]
    try:
        for pipe in ours:
            if not pipe.poll(READY_S):
                raise RuntimeError(f"a process of agents was not ready after {READY_S:g} s")
            pipe.recv()
        begun_s = time.perf_counter()
        for pipe in ours:
            pipe.send("go")
        told = [pipe.recv() for pipe in ours]
        wall_s = time.perf_counter() - begun_s
    except (EOFError, OSError) as error:
        raise RuntimeError("a process of agents failed: see above") from error
    finally:
        for process in started:
            process.join(timeout=5)
            process.kill()
    return Played(Seen.together([Seen(**one) for one, _ in told]), wall_s, [cpu_s for _, cpu_s in told])


def _play_part(pipe: Connection, part: Part) -> None:
    seen = Seen()
    pipe.send("ready")
    pipe.recv()
    own_s = time.process_time()
    asyncio.run(_agents(part, seen))
    told = {key: value for key, value in asdict(seen).items() if key != "on_turn"}
    pipe.send((told, time.process_time() - own_s))
