"""Twenty kills at random moments lose no turn whose commit was acknowledged, and the store goes on."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from turngate.proxy.store.codec import turn_digest
from turngate.proxy.store.turnstore import TurnStore

KILLS = 20
WRITER = """
import asyncio, sys
from pathlib import Path
from tests.proxy.store.samples import make_turn
from turngate.proxy.store.turnstore import TurnStore
from turngate.proxy.store.writer import TurnWriter

async def session(writer, rollout):
    base = None
    for seq in range(100_000):
        base = make_turn(rollout, seq, base)
        await writer.commit(base)
        print(base.id, flush=True)

async def main():
    store = TurnStore(Path(sys.argv[1]))
    writer = TurnWriter(store)
    await asyncio.gather(*(session(writer, f"life{sys.argv[2]}-{n}") for n in range(8)))

asyncio.run(main())
"""


def test_a_killed_writer_loses_no_acknowledged_turn(tmp_path: Path) -> None:
    path, rng = tmp_path / "turns-0.sqlite", random.Random(7)
    acknowledged: set[str] = set()
    for life in range(KILLS):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(life)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        told = [writer.stdout.readline()]
        time.sleep(rng.uniform(0, 0.25))
        writer.send_signal(signal.SIGKILL)
        told += writer.stdout.readlines()
        assert writer.wait() == -signal.SIGKILL
        acknowledged |= {line.strip() for line in told if line.endswith("\n")}
    with TurnStore(path) as store:
        assert store.check_file() == []
        present: set[str] = set()
        for rollout in store.rollouts():
            turns = store.turns(rollout)
            assert [turn.seq for turn in turns] == list(range(len(turns)))
            assert [turn_digest(turn) for turn in turns] == [digest for _, digest in store.digests(rollout)]
            present |= {turn.id for turn in turns}
    assert len(acknowledged) > KILLS
    assert acknowledged <= present
