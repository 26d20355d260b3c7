"""OpenEnv 0.10's capture proxy as a peer: installed in an environment of its own, run in front of the same engines.

It speaks chat completions to the engine, always whole ones, and replays them to agents that stream. It keeps turns in
memory; nothing is written to a disk. Only its public routes are used. Where there is no network, `OPENENV_PYTHON` names
an interpreter that can import it: `openenv==0.10.0`, fastapi, uvicorn and httpx are enough, because its parent
packages, which import much that the server does not use, are then not run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from bench.measuring import free_port, wait_until_up

VERSION = "0.10.0"
MODULE = "openenv.core.harness.capture.server"
BARE = f"""
import importlib.machinery, runpy, sys, types
path = None
for name in ("openenv", "openenv.core", "openenv.core.harness"):
    spec = importlib.machinery.PathFinder.find_spec(name, path)
    module = sys.modules[name] = types.ModuleType(name)
    path = module.__path__ = list(spec.submodule_search_locations)
runpy.run_module({MODULE!r}, run_name="__main__", alter_sys=True)
"""


def installed() -> Path:
    """The Python of an environment with OpenEnv, below the cache folder; made at the first call, which needs a network.

    Raises:
        subprocess.CalledProcessError: pip failed, in its own words.
    """
    from turngate.harnesses.install import cache_dir

    folder = cache_dir() / "bench" / f"openenv-{VERSION}"
    python = folder / "bin" / "python"
    ready = folder / "ready"
    if not ready.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-qqq", f"openenv=={VERSION}"], check=True)
        ready.write_text(VERSION)
    return python


class OpenEnvProxy:
    """The proxy on a free port; sessions are spread over the engines, as its `llm_url` of a session allows."""

    def __init__(self, engine_urls: list[str], folder: Path, model: str = "fake") -> None:
        self._engines, self._model = engine_urls, model
        self._log = folder / "openenv.log"
        self.url = ""
        self.process: subprocess.Popen[bytes]

    def __enter__(self) -> Self:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        given = os.environ.get("OPENENV_PYTHON")
        command = [given, "-c", BARE] if given else [str(installed()), "-m", MODULE]
        command += ["--llm-url", self._engines[0], "--model", self._model, "--engine", "vllm", "--port", str(port)]
        env = {key: value for key, value in os.environ.items() if given or key != "PYTHONPATH"}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=env)
        wait_until_up(self.process, f"{self.url}/health", "OpenEnv's proxy", self._log)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.process.terminate()
        self.process.wait(timeout=30)

    def endpoints(self, count: int) -> list[tuple[str, str]]:
        """New sessions: base URL and key of each.

        Raises:
            RuntimeError: a session would not capture tokens.
        """
        found = []
        for number in range(count):
            body = {"llm_url": self._engines[number % len(self._engines)], "model": self._model}
            answer = httpx.post(f"{self.url}/sessions", json=body, timeout=60, trust_env=False).json()
            if answer.get("capture_level") != "tokens":
                raise RuntimeError(f"OpenEnv's proxy answered {answer}; see {self._log}")
            found.append((f"{self.url}/v1", str(answer["session_id"])))
        return found

    def linked(self, keys: list[str]) -> int:
        """How many turns continue the one before them."""
        linked = 0
        for key in keys:
            stats = httpx.get(f"{self.url}/sessions/{key}", timeout=60, trust_env=False).raise_for_status().json()
            linked += stats["n_turns"] - stats["n_roots"]
        return linked
