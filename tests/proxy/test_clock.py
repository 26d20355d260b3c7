"""A wall clock that is set back or forward changes no order, no duration, no budget and no lease.

The gateway is a real process whose `time.time` and `time.time_ns` are moved while it runs, by a file.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fake_engine.runner import FakeEngine
from tests.gateway_process import GatewayProcess
from turngate.proxy import wire
from turngate.proxy.clock import SteadyUtc
from turngate.proxy.store.reader import StoreReader

HOUR_NS = 3600 * 10**9
MOVED = """
import os, time
_time_ns, _file = time.time_ns, os.environ["MOVED_CLOCK"]
def moved_ns():
    with open(_file) as file:
        return _time_ns() + int(file.read() or 0)
time.time_ns, time.time = moved_ns, lambda: moved_ns() / 1e9
"""


def test_it_moves_with_the_clock_that_nobody_sets() -> None:
    elapsed, wall = [5], [1000]
    clock = SteadyUtc(lambda: wall[0], lambda: elapsed[0])
    seen = [clock()]
    for wall[0], elapsed[0] in ((500, 6), (90_000, 7), (0, 20)):
        seen.append(clock())
    assert seen == [1000, 1001, 1002, 1015]
    assert abs(SteadyUtc()() - time.time_ns()) < HOUR_NS


@pytest.fixture
def moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`moved(hours)` sets the wall clock of processes started from now on, and of running ones."""
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved" / "sitecustomize.py").write_text(MOVED)
    file = tmp_path / "moved.ns"
    file.write_text("0")
    monkeypatch.setenv("MOVED_CLOCK", str(file))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "moved"), prepend=":")

    def move(hours: int) -> None:
        fresh = file.with_suffix(".new")
        fresh.write_text(str(hours * HOUR_NS))
        fresh.rename(file)

    return move


def test_a_clock_that_jumps_changes_no_order_duration_budget_or_lease(
    moved: Callable[[int], None], model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    began_ns = time.time_ns()
    with (
        FakeEngine(model_dir("qwen-coder-0.5b"), ["Hello."]) as fake,
        GatewayProcess(fake.url, tmp_path / "store") as gateway,
    ):
        made = [
            gateway.session(group="g", group_size=2, budgets={"max_wall_s": 3000}, deadline_s=3000) for _ in range(2)
        ]
        history: list[dict[str, str]] = []
        for number, hours in enumerate((0, -2, +5, -9)):
            moved(hours)
            history.append({"role": "user", "content": f"{number}"})
            for _, client in made:
                answer = client.chat.completions.create(model="policy", messages=history)  # type: ignore[arg-type]
                assert answer.choices[0].message.content == "Hello.", "a budget was taken for spent"
            history.append({"role": "assistant", "content": "Hello."})
        for created, _ in made:
            gateway.client.finish_rollout(created.id, wire.FinishRollout(reward=1.0))
        leased = gateway.client.lease(wire.NewLease(policy="policy", ttl_s=3000))
        moved(+9)
        gateway.client.heartbeat(leased.lease, wire.Heartbeat(epoch=leased.epoch, ttl_s=3000))
        assert gateway.client.lease(wire.NewLease(policy="policy", ttl_s=3000)).groups == []
        infos = [gateway.client.rollout(created.id) for created, _ in made]
        gateway.client.close()
    spent_ns = time.time_ns() - began_ns
    assert [group.id for group in leased.groups] == ["g"]
    assert made[0][0].id < made[1][0].id < leased.lease
    with StoreReader(gateway.store) as reader:
        for info in infos:
            assert info.finished_at_ns is not None
            assert 0 < info.finished_at_ns - info.created_at_ns < spent_ns
            turns = reader.turns(info.id)
            times = [turn.timings.received_at_ns for turn in turns]
            assert [turn.seq for turn in turns] == [0, 1, 2, 3]
            assert [turn.kind for turn in turns[1:]] == ["spliced"] * 3
            assert times == sorted(times)
            assert [turn.id for turn in turns] == sorted(turn.id for turn in turns)
            assert all(began_ns <= at_ns <= began_ns + spent_ns for at_ns in times)
            assert all(0 <= t.timings.done_ns - t.timings.received_ns < spent_ns for t in turns)
