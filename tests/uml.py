"""A Linux of the tests' own, booted as a process (User Mode Linux): cgroup v2 alone, whatever this machine has mounted.

The guest sees this machine's files read-only and has its own kernel, processes, mounts and network. It is off when its
command is done; nothing of it stays.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MEMORY = "768M"
ENDED = re.compile(r"guest-status=(\d+)")
INIT = """#!/bin/sh
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
mkdir -p /dev/shm /dev/pts; mount -t tmpfs tmp /dev/shm; mount -t devpts pts /dev/pts
ln -sf /proc/self/fd /dev/fd; mount -t cgroup2 cgroup /sys/fs/cgroup
ip link set lo up
cd {folder} && {command}
echo guest-status=$?
echo o >/proc/sysrq-trigger
sleep 60
"""


@dataclass(frozen=True)
class Ended:
    """The command's exit status, None where the guest never came so far, and all it printed, the kernel's words too."""

    status: int | None
    output: str


def run_in_guest(command: Sequence[str], init: Path, *, timeout_s: float = 300.0) -> Ended:
    """Boot, run `command` as root in this working directory with `TMPDIR` in memory, end. `init` is a file to be made.

    Raises:
        RuntimeError: User Mode Linux is not installed.
    """
    kernel = shutil.which("linux.uml")
    if kernel is None:
        raise RuntimeError("linux.uml is missing: requirements/setup.sh --tests installs it (user-mode-linux)")
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "HOME") if name in os.environ}
    env = {**kept, "TMPDIR": "/dev/shm", "PYTHONDONTWRITEBYTECODE": "1"}
    words = ["env", *(f"{name}={value}" for name, value in env.items()), *command]
    init.write_text(INIT.format(folder=shlex.quote(os.getcwd()), command=shlex.join(words)))
    init.chmod(0o755)
    boot = [kernel, f"mem={MEMORY}", "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro", f"init={init}"]
    boot += ["quiet", "con=null", "con0=null,fd:1"]
    done = subprocess.run(boot, capture_output=True, text=True, errors="replace", timeout=timeout_s)
    output = done.stdout + done.stderr
    found = ENDED.search(output)
    return Ended(int(found[1]) if found else None, output)


def python(*words: str) -> list[str]:
    """A command of this interpreter."""
    return [sys.executable, *words]
