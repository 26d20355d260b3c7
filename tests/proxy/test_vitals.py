"""The gateway's memory goes back to the system while it serves, and only then."""

from __future__ import annotations

import asyncio

import pytest

from turngate.proxy import vitals


async def test_memory_is_given_back_once_for_turns_that_were_kept_and_never_for_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns, trimmed = [0], asyncio.Event()
    loop, count = asyncio.get_running_loop(), [0]

    def trim() -> None:
        count[0] += 1
        loop.call_soon_threadsafe(trimmed.set)

    monkeypatch.setattr(vitals, "trim", trim)
    task = asyncio.create_task(vitals.give_memory_back(lambda: turns[0], every_s=0.001))
    await asyncio.sleep(0.01)
    assert count == [0]
    turns[0] = 3
    await trimmed.wait()
    await asyncio.sleep(0.01)
    assert count == [1]
    task.cancel()


def test_unused_memory_can_be_given_back_at_any_time() -> None:
    vitals.trim()
