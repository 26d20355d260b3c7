"""Real vLLM servers for tests: started once a session, in a process group that dies with it."""

from __future__ import annotations

import ctypes
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

_PR_SET_PDEATHSIG = 1
_UP_WITHIN_S = 900.0
_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
}
_ARGS = (
    *("--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "8192", "--max-num-seqs", "16"),
    *("--enable-scale-out", "--enable-lora", "--max-loras", "4", "--max-lora-rank", "16"),
    *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
)


@dataclass(frozen=True)
class RealEngine:
    """A vLLM server at `url` that serves `model`; `pid` leads its process group, 0 where it was running already."""

    url: str
    model: str
    pid: int = 0

    def kill(self) -> None:
        """End it at once, as a crash would; `vllm_server` starts another one."""
        os.killpg(self.pid, signal.SIGKILL)


@contextmanager
def vllm_server(model: pathlib.Path, log: pathlib.Path, *extra: str, port: int = 0) -> Iterator[RealEngine]:
    """vLLM for a model folder on a port (0: a free one), with scale-out, runtime adapters and processed log-probs.

    Raises:
        RuntimeError: it ended or was not up in time; the message has the end of its log.
    """
    with socket.create_server(("127.0.0.1", port)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    argv += ["--served-model-name", model.name, "--port", str(port), *_ARGS, *extra]
    with log.open("wb") as out:
        process = subprocess.Popen(
            argv,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | _ENV,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
    try:
        _wait_until_up(process, url, log)
        yield RealEngine(url, model.name, process.pid)
    finally:
        _end(process)


def real_engine(url: str) -> RealEngine:
    """A server that runs already."""
    models = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"]
    return RealEngine(url, next(one["id"] for one in models if not one["parent"]))


def _wait_until_up(process: subprocess.Popen[bytes], url: str, log: pathlib.Path) -> None:
    deadline_s = time.monotonic() + _UP_WITHIN_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise RuntimeError(f"vLLM ended with {process.returncode}:\n{_end_of(log)}")
        try:
            if httpx.get(f"{url}/health", trust_env=False, timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(1.0)
    raise RuntimeError(f"vLLM was not up within {_UP_WITHIN_S:.0f} s:\n{_end_of(log)}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the server and its workers: politely, then the whole group."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _end_of(log: pathlib.Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-3000:]
