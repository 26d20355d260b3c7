"""A gateway as users run it: the `turngate proxy` command in a process of its own, and its administration client."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
import openai

from turngate.proxy import wire
from turngate.proxy.client import GatewayClient


def free_port() -> int:
    """A port nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


class GatewayProcess:
    """`turngate proxy` on a free port. Keeps its port over `kill` and `start`, as a restarted gateway does."""

    def __init__(self, engine_url: str, store: Path, *options: str) -> None:
        self.store = store
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = store.parent / f"gateway-{self.port}.log"
        self._command = [
            *(sys.executable, "-m", "turngate.proxy.cli", "proxy", "--engine", engine_url, "--store", str(store)),
            *("--port", str(self.port), "--run", "test", "--log-level", "debug", *options),
        ]
        self.ready = (200,)
        """Statuses of `/readyz` that `start` waits for."""
        self.process: subprocess.Popen[bytes] | None = None
        self.client: GatewayClient

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.stop()

    def start(self) -> None:
        """Start it and wait until it is ready."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log, env={**os.environ, "NO_COLOR": "1"})
        while not self._ready():
            if self.process.poll() is not None:
                raise RuntimeError(f"the gateway ended with {self.process.returncode}:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.05)
        self.client = GatewayClient(self.url, (self.store / "admin.key").read_text().strip())

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def session(self, **new: object) -> tuple[wire.RolloutCreated, openai.OpenAI]:
        """A new rollout and an SDK client on its base URL."""
        created = self.client.create_rollout(wire.NewRollout.model_validate({"task": "test", **new}))
        return created, openai.OpenAI(base_url=created.base_url, api_key=created.api_key, max_retries=0, timeout=120)

    def _ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz", timeout=2).status_code in self.ready
        except httpx.HTTPError:
            return False
