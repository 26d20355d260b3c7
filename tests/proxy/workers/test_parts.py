"""The small parts of several processes: secrets that name a worker, ports that are kept, metrics put together."""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngate.proxy.engines import Found
from turngate.proxy.errors import WorkerAway
from turngate.proxy.ids import new_secret
from turngate.proxy.keys import secret_prefix, worker_of
from turngate.proxy.settings import GatewaySettings
from turngate.proxy.store.export_records import SECRET
from turngate.proxy.store.layout import StoreFolder
from turngate.proxy.workers import fleet
from turngate.proxy.workers.exposition import merged
from turngate.proxy.workers.ports import worker_listeners

ONE = """# HELP a what it counts
# TYPE a counter
a{kind="x"} 1
# HELP h how long
# TYPE h histogram
h_bucket{le="+Inf"} 2
h_sum 0.5
h_count 2
# HELP g a gauge
# TYPE g gauge
g 3
"""


@given(st.integers(min_value=0, max_value=255) | st.none())
def test_a_secret_names_its_worker_and_is_blanked_in_exports(worker: int | None) -> None:
    secret = new_secret(secret_prefix(worker))
    assert worker_of(secret) == (worker or 0)
    assert SECRET.fullmatch(secret)


@given(st.text())
def test_whatever_else_is_sent_names_the_first_worker_or_some_number(text: str) -> None:
    assert worker_of(text) >= 0


def test_metrics_of_workers_carry_their_number_and_are_described_once() -> None:
    assert merged("# HELP g a gauge\n# TYPE g gauge\ng 1\n", {0: ONE, 1: ONE, 2: ""}).splitlines() == [
        "# HELP g a gauge",
        "# TYPE g gauge",
        "g 1",
        'g{worker="0"} 3',
        'g{worker="1"} 3',
        "# HELP a what it counts",
        "# TYPE a counter",
        'a{worker="0",kind="x"} 1',
        'a{worker="1",kind="x"} 1',
        "# HELP h how long",
        "# TYPE h histogram",
        *('h_bucket{worker="0",le="+Inf"} 2\nh_sum{worker="0"} 0.5\nh_count{worker="0"} 2'.splitlines()),
        *('h_bucket{worker="1",le="+Inf"} 2\nh_sum{worker="1"} 0.5\nh_count{worker="1"} 2'.splitlines()),
    ]


def test_ports_are_kept_with_the_store_and_another_is_taken_where_one_is_gone(tmp_path: Path) -> None:
    folder = StoreFolder.create(tmp_path / "store", "run", 1)
    first = worker_listeners(folder, "127.0.0.1", 0, 2)
    ports = [listener.getsockname()[1] for listener in first]
    for listener in first:
        listener.close()
    with socket.create_server(("127.0.0.1", ports[0])):
        again = worker_listeners(folder, "127.0.0.1", 0, 3, sleep=lambda pause_s: None)
    now = [listener.getsockname()[1] for listener in again]
    assert now[1] == ports[1]
    assert now[0] != ports[0]
    assert folder.facts()["worker_ports"] == {str(worker): port for worker, port in enumerate(now)}
    for listener in again:
        listener.close()


async def test_a_worker_that_cannot_be_started_now_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the machine has no memory or no process left: the watch over it must not end."""
    tried, launch = 0, asyncio.create_subprocess_exec

    async def scarce(*command: str, **options: Any) -> asyncio.subprocess.Process:
        nonlocal tried
        tried += 1
        if tried == 1:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return await launch(sys.executable, "-c", "import sys; sys.exit(3)", **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", scarce)
    monkeypatch.setattr(fleet, "PAUSES_S", (0.0,))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        settings = GatewaySettings(engines=["http://engine"], store=Path("store"))
        worker = fleet._Worker(0, listener, "key", settings)
        for _ in range(2):
            with pytest.raises(WorkerAway, match="ended at its start"):
                await worker.start(Found((), None, has_tokenizer=False))  # type: ignore[arg-type]
        assert tried == 2
        monkeypatch.setattr(worker, "_launch", lambda: _failing(worker))
        await asyncio.wait_for(worker._keep_up(), 30)
        assert worker.restarts == 3


async def _failing(worker: fleet._Worker) -> bool:
    if worker.restarts == 3:
        worker.terminate()
    return False
