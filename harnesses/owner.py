"""Who owns a leftover: a runner's identity that survives its death, so that a later one knows whether it still lives.

Process ids come again; together with the start time, the boot and the process namespace they do not. An owner of
another machine or namespace cannot be judged from here and must never be taken for dead.
"""

from __future__ import annotations

import os
from pathlib import Path

PREFIX = "turngate-"


def owner_id(pid: int | None = None) -> str:
    """`BOOT-NAMESPACE.PID.START` of a living process, this one by default: names of cgroups, labels of containers."""
    chosen = pid or os.getpid()
    return f"{_where()}.{chosen}.{_start_ticks(chosen)}"


def is_dead(owner: str) -> bool:
    """Whether the owner was a process of this boot and namespace and is gone; False for what cannot be known."""
    where, _, rest = owner.partition(".")
    pid, _, ticks = rest.partition(".")
    if where != _where() or not pid.isdigit():
        return False
    try:
        return str(_start_ticks(int(pid))) != ticks
    except OSError:
        return True


def _where() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    return f"{boot}-{os.readlink('/proc/self/ns/pid').strip('pid:[]')}"


def _start_ticks(pid: int) -> int:
    """Field 22 of /proc/PID/stat; the command name before it may hold spaces and brackets."""
    text = Path(f"/proc/{pid}/stat").read_text()
    return int(text.rpartition(")")[2].split()[19])
