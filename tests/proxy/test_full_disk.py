"""A disk that fills up: turns are refused before they are sampled, nothing acknowledged is lost, and it goes on after.

On a small tmpfs of its own where mounting is permitted, else with a limit on the size of files; the second is tested
everywhere too.
"""

from __future__ import annotations

import os
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import httpx
import pytest

from tests.fake_engine.runner import FakeEngine
from tests.gateway_process import GatewayProcess
from tests.proxy.conftest import StartFake
from turngate.proxy import wire
from turngate.proxy.store.layout import StoreFolder
from turngate.proxy.store.turnstore import TurnStore
from turngate.proxy.verify import verify_store

BODY = {"messages": [{"role": "user", "content": "word " * 2000}]}
DISK_BYTES = 16_000_000


class Disk(Protocol):
    """Where a store is that can run out of space."""

    folder: Path

    def fill(self, gateway: GatewayProcess) -> None:
        """Leave no space."""

    def free(self, gateway: GatewayProcess) -> None:
        """Give it back."""


class Tmpfs:
    """A small file system."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def fill(self, gateway: GatewayProcess) -> None:
        with self._filler.open("wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    continue
            except OSError:
                return

    def free(self, gateway: GatewayProcess) -> None:
        self._filler.unlink()


class SizeLimit:
    """The gateway's files may not grow: what a quota looks like, for free space shows nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fill(self, gateway: GatewayProcess) -> None:
        assert gateway.process is not None
        resource.prlimit(gateway.process.pid, resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))

    def free(self, gateway: GatewayProcess) -> None:
        assert gateway.process is not None
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(gateway.process.pid, resource.RLIMIT_FSIZE, unlimited)


@pytest.fixture(params=["file system", "size limit"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    """A disk to fill."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "turngate-test", str(folder)]
    wanted = request.param == "file system"
    if not wanted or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        yield SizeLimit(folder)
        return
    try:
        yield Tmpfs(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def start(disk: Disk, start_fake: StartFake) -> Iterator[Callable[..., tuple[FakeEngine, GatewayProcess]]]:
    """`start(*options)`: an engine and a gateway whose store is on that disk; its log is not."""
    running: list[GatewayProcess] = []

    def both(*options: str) -> tuple[FakeEngine, GatewayProcess]:
        fake = start_fake(["Hello."])
        gateway = GatewayProcess(fake.url, disk.folder / "store", *options)
        gateway.log = disk.folder.parent / "gateway.log"
        gateway.start()
        running.append(gateway)
        return fake, gateway

    yield both
    for gateway in running:
        gateway.stop()


def ask(url: str, *, stream: bool = False) -> tuple[int, str]:
    """Status, and the id of the turn in a whole answer or else the code of the error."""
    answer = httpx.post(f"{url}/chat/completions", json={**BODY, "stream": stream}, timeout=60)
    if stream and answer.status_code == 200:
        ended = answer.text.endswith("data: [DONE]\n\n")
        found = answer.text.split('"id":"chatcmpl-' if ended else '"code":"')[1].split('"')[0]
        return (200 if ended else 507), found
    error = answer.json().get("error")
    return answer.status_code, error["code"] if error else answer.json()["id"].removeprefix("chatcmpl-")


def sampled(fake: FakeEngine) -> int:
    return sum(path.endswith("/generate") for path, _ in fake.engine.requests)


def ask_until_kept(url: str) -> str:
    """The first turn kept after space returned; the gateway looks for space every half second."""
    deadline_s = time.monotonic() + 60
    while (said := ask(url))[0] != 200:
        assert said == (507, "store_full")
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    return said[1]


def check_kept(gateway: GatewayProcess, turns: list[str]) -> None:
    """All of `turns` are in the store, the others never were acknowledged, and everything verifies."""
    gateway.stop()
    with TurnStore(StoreFolder.find(gateway.store).turns(0), readonly=True) as store:
        kept = [turn.id for rollout in store.rollouts() for turn in store.turns(rollout)]
    assert sorted(kept) == sorted(turns)
    assert verify_store(gateway.store).problems == []


def test_a_write_that_fails_is_an_error_not_an_answer_and_the_next_turns_are_not_sampled(
    disk: Disk, start: Callable[..., tuple[FakeEngine, GatewayProcess]]
) -> None:
    fake, gateway = start("--min-free-bytes", "0")
    created = gateway.session()[0]
    kept = [ask(created.base_url)[1] for _ in range(3)]
    disk.fill(gateway)
    for stream in (True, False):
        if stream:
            assert ask(created.base_url, stream=True) == (507, "store_full")  # sampled, and then not kept
        before = sampled(fake)
        assert ask(created.base_url, stream=stream) == (507, "store_full")
        assert sampled(fake) == before
    assert httpx.get(f"{gateway.url}/metrics").status_code == 200
    disk.free(gateway)
    kept.append(ask_until_kept(created.base_url))
    kept.append(ask(created.base_url, stream=True)[1])
    gateway.client.finish_rollout(created.id, wire.FinishRollout(reward=1.0))
    check_kept(gateway, kept)


def test_with_too_little_space_left_nothing_is_sampled_and_results_still_are_taken(
    disk: Disk, start: Callable[..., tuple[FakeEngine, GatewayProcess]]
) -> None:
    free = os.statvfs(disk.folder)
    reserve = 8_000_000 if isinstance(disk, Tmpfs) else free.f_bavail * free.f_frsize * 2
    fake, gateway = start("--min-free-bytes", str(0 if isinstance(disk, SizeLimit) else reserve))
    created = gateway.session()[0]
    kept = [ask(created.base_url)[1]]
    if isinstance(disk, SizeLimit):
        gateway.stop()
        gateway = GatewayProcess(fake.url, gateway.store, "--min-free-bytes", str(reserve))
        gateway.ready = (503,)
        gateway.log = disk.folder.parent / "gateway.log"
        gateway.start()
        url = created.base_url.replace(created.base_url.split("/")[2], f"127.0.0.1:{gateway.port}")
    else:
        (disk.folder / "other").write_bytes(bytes(9_000_000))
        url = created.base_url
    told = httpx.get(f"{gateway.url}/readyz")
    assert (told.status_code, f"min_free_bytes is {reserve}" in told.json()["missing"][0]) == (503, True)
    before = sampled(fake)
    for stream in (True, False):
        answer = httpx.post(f"{url}/chat/completions", json={**BODY, "stream": stream}, timeout=60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (507, "store_full")
    assert sampled(fake) == before
    key = {"authorization": f"Bearer {(gateway.store / 'admin.key').read_text().strip()}"}
    assert httpx.post(f"{gateway.url}/rollouts", json={"task": "t"}, headers=key).status_code == 507
    gateway.client.finish_rollout(created.id, wire.FinishRollout(reward=1.0))
    check_kept(gateway, kept)
