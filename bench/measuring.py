"""What the benchmarks measure with: CPU and memory from /proc, sizes on disk, and fake engines to run against.

Nothing here knows what is measured, so that a gateway and another proxy are measured by the same code.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parent.parent
_TICK_MS = 1000 / os.sysconf("SC_CLK_TCK")
_PAGE_MB = os.sysconf("SC_PAGE_SIZE") / 1e6


def processes(root: int) -> list[int]:
    """`root` and all processes below it."""
    found = [root]
    for task in Path(f"/proc/{root}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += processes(int(child))
    return found


def cpu_ms(root: int) -> float:
    """User and system time of a process and those below it, ended children included, in ms (ticks of 10 ms)."""
    return sum(_cpu_ms(pid, slice(11, 15)) for pid in processes(root))


def own_cpu_ms(pid: int) -> float:
    """User and system time of one process, none below it, in ms (ticks of 10 ms)."""
    return _cpu_ms(pid, slice(11, 13))


def _cpu_ms(pid: int, fields: slice) -> float:
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(one) for one in stat[fields]) * _TICK_MS


def core_wait_ms(root: int) -> float:
    """How long the threads that now live in a process and those below it were ready to run but had no core, in ms."""
    waited_ns = 0
    for pid in processes(root):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                waited_ns += int((task / "schedstat").read_text().split()[1])
    return waited_ns / 1e6


def rss_mb(root: int) -> float:
    """Resident memory of a process and those below it, in MB."""
    return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_MB for pid in processes(root))


def folder_bytes(folder: Path) -> int:
    """Size of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def file_system(folder: Path) -> str:
    """The type of the file system that a folder is on, from /proc/mounts."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    above = {str(folder.resolve()), *map(str, folder.resolve().parents)}
    return max((len(point), kind) for point, kind in mounts if point in above)[1]


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def free_port() -> int:
    """A port nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def wait_until_up(process: subprocess.Popen[bytes], url: str, what: str, log: Path | None = None) -> None:
    """Until `url` answers 200.

    Raises:
        RuntimeError: the process ended before that.
    """
    while process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, trust_env=False).status_code == 200:
                return
        time.sleep(0.1)
    words = log.read_text(errors="replace")[-3000:] if log else ""
    raise RuntimeError(f"{what} ended with {process.returncode}: {words}")


@dataclass(frozen=True)
class FakeProcess:
    """A fake engine that runs: its URL, and its process."""

    url: str
    pid: int


@contextlib.contextmanager
def fake_engine(
    tokenizer: Path,
    answers: Sequence[Any],
    folder: Path,
    *,
    tokens_per_s: float,
    keep_times: bool = True,
    intervals: bool = True,
) -> Iterator[FakeProcess]:
    """A fake engine in a process of its own that says `answers`: one token an event, or as many as are asked for."""
    port = free_port()
    said = folder / f"answers-{port}.json"
    said.write_text(json.dumps(answers))
    command = [sys.executable, "-m", "tests.fake_engine", "--port", str(port), "--tokenizer", str(tokenizer)]
    command += ["--tokens-per-s", str(tokens_per_s), "--chunk", "1", "--max-model-len", "131072"]
    command += ["--fillers", str(said), *(["--keep-times"] if keep_times else [])]
    command += [] if intervals else ["--no-intervals"]
    process = subprocess.Popen(command, cwd=ROOT)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_up(process, f"{url}/health", "the fake engine")
        yield FakeProcess(url, process.pid)
    finally:
        process.terminate()
        process.wait(timeout=30)
