"""Worker processes as a test sees them: who they are, and that they have gone."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.gateway_process import GatewayProcess


def worker_pids(gateway: GatewayProcess) -> list[int]:
    """The gateway's worker processes, in the order of their start."""
    assert gateway.process is not None
    tasks = Path(f"/proc/{gateway.process.pid}/task").iterdir()
    return sorted(int(pid) for task in tasks for pid in (task / "children").read_text().split())


def alive(pid: int) -> bool:
    """Whether a process runs (one that is only waited for does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def kill_worker(gateway: GatewayProcess, pid: int) -> None:
    """SIGKILL one worker of this gateway."""
    assert pid in worker_pids(gateway)
    os.kill(pid, signal.SIGKILL)
