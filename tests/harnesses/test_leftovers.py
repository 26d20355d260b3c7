"""After a kill or Ctrl-C of `turngate run`, no process and no sandbox of it is left: checked by process list."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.fake_engine.settings import FakeSettings
from tests.gateway_process import GatewayProcess
from tests.harnesses.conftest import TaskMaker
from tests.harnesses.test_sandbox import leftovers
from turngate.harnesses.workspace import reap_scratch

GONE_WITHIN_S = 20.0


class Run:
    """`turngate run` on a gateway whose engine answers slowly, so that agents are in the middle of a turn."""

    def __init__(self, gateway: GatewayProcess, tasks: Path, marker: str, folder: Path) -> None:
        self.gateway = gateway
        self.marker = marker
        self.scratch = folder / "scratch"
        command = [sys.executable, "-m", "turngate.proxy.cli", "run", f"gateway={gateway.url}", f"tasks={tasks}"]
        command += [f"admin_key_file={gateway.store / 'admin.key'}", f"scratch={self.scratch}", "concurrency=3"]
        self.log = folder / "run.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def wait_for_agents(self) -> None:
        """Until all three agents run and have asked for a turn."""
        deadline = time.monotonic() + 120
        while sum("cli.js" in line and "bwrap" not in line for line in leftovers(self.marker)) < 3:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)

    def remains(self) -> list[str]:
        """What is left of the run once it had time to go."""
        deadline = time.monotonic() + GONE_WITHIN_S
        while (found := leftovers(self.marker)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found


@pytest.fixture
def run(serve: Callable[..., GatewayProcess], make_task: TaskMaker, tmp_path: Path) -> Iterator[Run]:
    """A run with three agents in flight."""
    marker = f"marker-{os.getpid()}-{time.monotonic_ns()}"
    gateway = serve(["slow " * 2000], settings=FakeSettings(tokens_per_s=5.0))
    task = make_task("echo 1 > /logs/verifier/reward.txt", prompts=(f"Say something about {marker}.",))
    started = Run(gateway, task.folder, marker, tmp_path)
    started.wait_for_agents()
    yield started
    if started.process.poll() is None:
        started.process.kill()
        started.process.wait()
    reap_scratch(started.scratch)


@pytest.mark.harness
def test_after_a_kill_of_the_runner_no_process_is_left_and_its_folders_go_with_the_next_run(run: Run) -> None:
    run.process.send_signal(signal.SIGKILL)
    run.process.wait()
    assert run.remains() == []
    assert list(run.scratch.glob("turngate-run-*"))
    assert reap_scratch(run.scratch) == 1
    assert list(run.scratch.glob("turngate-run-*")) == []


@pytest.mark.harness
def test_ctrl_c_closes_the_sessions_as_cancelled_and_leaves_nothing(run: Run) -> None:
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(timeout=60) == 130
    assert run.remains() == []
    assert list(run.scratch.glob("turngate-run-*")) == []
    assert run.gateway.client.status().open_rollouts == 0


@pytest.mark.harness
def test_a_second_ctrl_c_leaves_at_once_and_leaves_nothing(run: Run) -> None:
    children = psutil.Process(run.process.pid).children(recursive=True)
    run.process.send_signal(signal.SIGINT)
    time.sleep(0.01)
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(timeout=60) == 130
    assert run.remains() == []
    assert [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE] == []
