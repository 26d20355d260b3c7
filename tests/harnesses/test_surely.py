"""Work that must go to its end."""

from __future__ import annotations

import asyncio

import pytest

from turngate.harnesses.surely import surely


async def test_it_ends_however_often_its_waiter_is_cancelled_and_then_the_cancellation_is_raised() -> None:
    ended, go = [], asyncio.Event()

    async def work() -> None:
        await go.wait()
        ended.append(True)

    waiter = asyncio.create_task(surely(work()))
    for _ in range(3):
        await asyncio.sleep(0)
        waiter.cancel()
        await asyncio.sleep(0)
        assert not waiter.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert ended == [True]


async def test_its_result_and_its_error_come_back() -> None:
    async def fine() -> int:
        return 3

    async def wrong() -> int:
        raise ValueError("no")

    assert await surely(fine()) == 3
    with pytest.raises(ValueError, match="no"):
        await surely(wrong())
