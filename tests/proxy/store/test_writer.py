"""Commits: awaited means written, an error reaches the one it belongs to, closing drains, a slow disk stops no loop."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.proxy.store.samples import make_turn
from turngate.proxy.store import writer as writing
from turngate.proxy.store.errors import Conflict, StoreClosed, StoreError
from turngate.proxy.store.turnstore import CHECKPOINT_BYTES, TurnStore
from turngate.proxy.store.writer import TurnWriter
from turngate.proxy.turns import Turn


class Counting(TurnStore):
    """A store that remembers how many turns each transaction held."""

    batches: list[int]

    def commit(self, turns: Sequence[Turn]) -> None:
        self.__dict__.setdefault("batches", []).append(len(turns))
        super().commit(turns)


async def test_when_commit_returns_another_reader_sees_the_turn(tmp_path: Path) -> None:
    path = tmp_path / "turns-0.sqlite"
    with TurnStore(path) as store, TurnStore(path, readonly=True) as reader:
        writer = TurnWriter(store)
        for number in range(20):
            await writer.commit(make_turn("r", number))
            assert reader.counts("r").turns == number + 1
        await writer.close()


async def test_turns_that_wait_together_share_transactions(tmp_path: Path) -> None:
    with Counting(tmp_path / "turns-0.sqlite") as store:
        writer = TurnWriter(store)
        await asyncio.gather(*(writer.commit(make_turn(f"r{number}", 0)) for number in range(300)))
        await writer.close()
        assert sum(store.batches) == 300
        assert len(store.batches) < 100


async def test_a_turn_that_cannot_be_kept_fails_alone(tmp_path: Path) -> None:
    with TurnStore(tmp_path / "turns-0.sqlite") as store:
        writer = TurnWriter(store)
        wrong = make_turn("r0", 0, request={"messages": [object()]})
        results = await asyncio.gather(
            *(writer.commit(make_turn(f"r{number}", 0)) for number in range(10)),
            writer.commit(make_turn("r3", 0)),
            writer.commit(wrong),
            return_exceptions=True,
        )
        assert results[:10] == [None] * 10
        assert isinstance(results[10], Conflict)
        assert isinstance(results[11], StoreError)
        await writer.commit(make_turn("r0", 1))
        assert store.counts().turns == 11
        await writer.close()


async def test_a_cancelled_commit_is_still_written(tmp_path: Path) -> None:
    with TurnStore(tmp_path / "turns-0.sqlite") as store:
        writer = TurnWriter(store)
        task = asyncio.create_task(writer.commit(make_turn("r", 0)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await writer.close()
        assert len(store.turns("r")) == 1


async def test_closing_drains_and_then_refuses(tmp_path: Path) -> None:
    with TurnStore(tmp_path / "turns-0.sqlite") as store:
        writer = TurnWriter(store)
        tasks = [asyncio.create_task(writer.commit(make_turn("r", number))) for number in range(50)]
        await asyncio.sleep(0)
        await writer.close()
        await asyncio.gather(*tasks)
        assert store.counts().turns == 50
        await writer.close()
        with pytest.raises(StoreClosed):
            await writer.commit(make_turn("r", 99))


async def test_a_commit_at_once_is_seen_by_another_reader_and_raises_what_is_wrong(
    tmp_path: Path,
) -> None:
    path = tmp_path / "turns-0.sqlite"
    with TurnStore(path) as store, TurnStore(path, readonly=True) as reader:
        writer = TurnWriter(store)
        for number in range(20):
            assert writer.takes_now
            writer.commit_now(make_turn("r", number))
            assert reader.counts("r").turns == number + 1
        with pytest.raises(Conflict):
            writer.commit_now(make_turn("r", 3))
        assert writer.takes_now
        await writer.close()
        assert not writer.takes_now


async def test_no_commit_passes_those_that_the_thread_has(tmp_path: Path) -> None:
    with Counting(tmp_path / "turns-0.sqlite") as store:
        writer = TurnWriter(store)
        task = asyncio.create_task(writer.commit(make_turn("r", 0)))
        await asyncio.sleep(0)
        assert not writer.takes_now
        await task
        assert writer.takes_now
        await writer.close()


async def test_where_each_commit_waits_for_the_disk_the_thread_makes_all(tmp_path: Path) -> None:
    with TurnStore(tmp_path / "turns-0.sqlite", durability="full") as store:
        writer = TurnWriter(store)
        assert not writer.takes_now
        await writer.commit(make_turn("r", 0))
        assert not writer.takes_now
        await writer.close()


async def test_after_a_slow_commit_the_thread_makes_them_for_a_while(tmp_path: Path) -> None:
    now_s = 0.0
    took_s = writing.SLOW_S * 2

    class Slow(TurnStore):
        def commit(self, turns: Sequence[Turn]) -> None:
            nonlocal now_s
            super().commit(turns)
            now_s += took_s

    with Slow(tmp_path / "turns-0.sqlite") as store:
        writer = TurnWriter(store, clock=lambda: now_s)
        writer.commit_now(make_turn("r", 0))
        assert not writer.takes_now
        took_s = 0.0
        await writer.commit(make_turn("r", 1))
        assert not writer.takes_now
        now_s += writing.SLOW_FOR_S
        assert writer.takes_now
        writer.commit_now(make_turn("r", 2))
        assert writer.takes_now
        await writer.close()
        assert store.counts().turns == 3


async def test_a_file_that_another_program_has_locked_is_waited_for_by_the_thread_alone(tmp_path: Path) -> None:
    path = tmp_path / "turns-0.sqlite"
    with TurnStore(path) as store:
        writer = TurnWriter(store)
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        assert not writer.commit_now(make_turn("r", 0))
        assert not writer.takes_now
        task = asyncio.create_task(writer.commit(make_turn("r", 0)))
        await asyncio.sleep(writing.LOCK_PATIENCE_S * 5)
        assert not task.done()
        other.execute("ROLLBACK")
        other.close()
        await task
        assert store.counts("r").turns == 1
        await writer.close()


async def test_the_log_is_moved_into_the_file_by_the_thread_and_does_not_grow_without_end(tmp_path: Path) -> None:
    path = tmp_path / "turns-0.sqlite"
    log = path.with_name(path.name + "-wal")
    with TurnStore(path) as store:
        writer = TurnWriter(store)
        longest = checkpoints = 0
        for number in range(1_500):
            if writer.takes_now:
                writer.commit_now(make_turn("r", number))
            else:
                checkpoints += 1
                await writer.commit(make_turn("r", number))
            longest = max(longest, log.stat().st_size)
        await writer.close()
        assert store.counts().turns == 1_500
        assert checkpoints >= 2
        assert longest < 4 * CHECKPOINT_BYTES
    assert not TurnStore(path, readonly=True).check_file()
