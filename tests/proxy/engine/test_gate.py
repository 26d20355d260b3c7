"""Admission to an engine: who waits, who is let in, who is refused."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngate.proxy.engine.errors import EngineBusy, EngineUnavailable
from turngate.proxy.engine.gate import AdmissionLimits, Gate, Observed, has_room, waiting_now
from turngate.proxy.engine.types import EngineLoad


def load(waiting: int = 0, kv_usage: float = 0.0, running: int = 4) -> EngineLoad:
    return EngineLoad(running, waiting, kv_usage)


async def test_turns_wait_while_the_engine_has_a_queue_and_enter_in_order() -> None:
    gate, entered = Gate("engine-0", AdmissionLimits(queue=2)), list[int]()
    leave = asyncio.Event()

    async def turn(number: int) -> None:
        async with gate.turn():
            entered.append(number)
            await leave.wait()

    gate.observe(load(waiting=1))
    tasks = [asyncio.create_task(turn(number)) for number in range(4)]
    await asyncio.sleep(0)
    assert (entered, gate.own, gate.queued) == ([0], 1, 3)
    gate.observe(load(waiting=0))  # the one that waited runs now
    await asyncio.sleep(0)
    assert (entered, gate.queued) == ([0, 1, 2], 1)
    leave.set()
    await asyncio.gather(*tasks)
    assert (entered, gate.own, gate.queued) == ([0, 1, 2, 3], 0, 0)


async def test_a_full_cache_lets_one_turn_wait_inside_the_engine_so_that_it_never_idles() -> None:
    limits = AdmissionLimits(queue=64, kv_usage=0.9)
    assert has_room(Observed(load(kv_usage=0.95), 3), 3, limits)
    assert not has_room(Observed(load(kv_usage=0.95), 3), 4, limits)
    assert not has_room(Observed(load(waiting=1, kv_usage=0.95), 3), 3, limits)
    assert has_room(Observed(load(waiting=1, kv_usage=0.8), 3), 3, limits)


async def test_waiting_is_bounded_and_refusing_is_at_once() -> None:
    counts: Counter[str] = Counter()

    def count(metric: str, engine: str) -> None:
        counts[metric] += 1

    for wait_s, waits in ((0.01, 1), (0.0, 0)):
        counts.clear()
        gate = Gate("engine-0", AdmissionLimits(queue=1, wait_s=wait_s), count)
        gate.observe(load(waiting=5))
        with pytest.raises(EngineBusy, match="engine-0"):
            await gate.turn().__aenter__()
        assert (gate.own, gate.queued) == (0, 0)
        assert counts["turngate_admission_refusals_total"] == 1
        assert counts["turngate_admission_waits_total"] == waits


async def test_who_waits_for_an_engine_that_goes_away_goes_elsewhere() -> None:
    gate = Gate("engine-0", AdmissionLimits(queue=1))
    gate.observe(load(waiting=5))
    waiting = asyncio.create_task(gate.turn().__aenter__())
    await asyncio.sleep(0)
    gate.away()
    with pytest.raises(EngineUnavailable, match="went away"):
        await waiting
    async with gate.turn():
        assert gate.own == 1


@given(st.lists(st.sampled_from(["enter", "leave", "cancel", "busy", "free", "away"]), max_size=30))
def test_no_place_is_lost_or_given_twice(steps: list[str]) -> None:
    async def play() -> None:
        gate = Gate("engine-0", AdmissionLimits(queue=2))
        tasks: list[asyncio.Task[None]] = []
        leaves: dict[int, asyncio.Event] = {}
        inside: set[int] = set()

        async def turn(number: int) -> None:
            async with gate.turn():
                inside.add(number)
                try:
                    await leaves[number].wait()
                finally:
                    inside.discard(number)

        for number, step in enumerate(steps):
            if step == "enter":
                leaves[number] = asyncio.Event()
                tasks.append(asyncio.create_task(turn(number)))
            elif step == "leave" and inside:
                leaves[min(inside)].set()
            elif step == "cancel" and tasks:
                tasks[number % len(tasks)].cancel()
            elif step in ("busy", "free"):
                gate.observe(load(waiting=2 if step == "busy" else 0))
            elif step == "away":
                gate.away()
            if number % 3:
                await asyncio.sleep(0)
        await asyncio.sleep(0.001)
        assert gate.own == len(inside)
        gate.away()
        for event in leaves.values():
            event.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (gate.own, gate.queued) == (0, 0)

    asyncio.run(play())


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 50))
def test_the_estimate_follows_what_was_sent_and_what_ended(waiting: int, before: int, now: int) -> None:
    assert waiting_now(Observed(load(waiting), before), now) == max(0, waiting + now - before)
