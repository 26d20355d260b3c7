"""The default sandbox on Linux: bubblewrap with namespaces of its own for everything, and no network but the gateway.

Inside: the system's /usr read-only, a synthetic /etc, the harness and node read-only, a private home and the workspace
at the same paths for every rollout. The process namespace dies as a whole with bwrap, and bwrap with the runner.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path, PurePosixPath

from turngate.harnesses.cgroups import Cgroup, Cgroups
from turngate.harnesses.enclosed import Enclosed
from turngate.harnesses.errors import SandboxUnavailable
from turngate.harnesses.sandbox import OPT, Finished, Ground, Job, Limits, Mount
from turngate.harnesses.spawn import (
    DOOR_PORT,
    LAUNCHER,
    Spawn,
    in_cgroup,
    kill_group,
    launcher_words,
    run_spawned,
    unheld,
)
from turngate.tasks.harbor import Task

SYSTEM_LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")
SHARED_ETC = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime")
ETC = Path(__file__).parent / "templates" / "etc"


class Bubblewrap(Enclosed):
    """See `turngate.harnesses.sandbox.Sandbox`."""

    name = "bubblewrap"
    isolated = True

    def __init__(self, cgroups: Cgroups | None = None) -> None:
        self._cgroups = cgroups or Cgroups.none()
        self._bwrap = shutil.which("bwrap") or "bwrap"
        self._python, self._python_mounts = _find_python()

    def check(self) -> None:
        """Try an empty sandbox; the commonest refusals are named with their cure."""
        try:
            done = subprocess.run(
                [self._bwrap, "--unshare-all", "--unshare-user", "--ro-bind", "/", "/", "--proc", "/proc", "true"],
                capture_output=True,
                text=True,
                timeout=30,
            )
        except FileNotFoundError:
            raise SandboxUnavailable(
                "bwrap is not installed: install the system package bubblewrap, or choose the sandbox 'process' "
                "(no isolation) for tasks you trust"
            ) from None
        if done.returncode != 0:
            raise SandboxUnavailable(
                f"bwrap cannot make namespaces here ({done.stderr.strip()}): allow unprivileged user namespaces "
                "(sysctl kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0), or "
                "choose the sandbox 'process' (no isolation) for tasks you trust"
            )

    def unenforced(self, limits: Limits) -> list[str]:
        """Without cgroups, limits hold for each process only."""
        return unheld(self._cgroups, limits)

    async def prepare(self, task: Task) -> Ground:
        """The task's files; there is no image, the sandbox shows the host's /usr."""
        return Ground(task.environment if task.environment.is_dir() else None)

    def close(self) -> None:
        """Remove this runner's cgroups."""
        self._cgroups.close()

    async def run(self, job: Job) -> Finished:
        """See the protocol."""
        return await in_cgroup(self._cgroups, job.limits, lambda cgroup: self._run(job, cgroup))

    async def _run(self, job: Job, cgroup: Cgroup) -> Finished:
        ours, theirs = socket.socketpair()
        info_read, info_write = os.pipe()
        port = DOOR_PORT if job.gateway is not None else 0
        args_read = _memory_file("\0".join(self._arguments(job, info_write)) + "\0")
        launch = [str(OPT / "launcher.py"), *launcher_words(theirs.fileno(), job, port=port, guard=False)]
        init = _InitProcess(info_read)
        spawn = Spawn(
            argv=cgroup.joining([self._bwrap, "--args", str(args_read), "--", self._python, "-I", "-S", *launch]),
            env={"PATH": os.defpath},
            pass_fds=(theirs.detach(), info_write, args_read),
            cwd="/",
            end=lambda pid, _control: kill_group(pid),
            gone=init.gone,
        )
        try:
            return await run_spawned(job, spawn, ours)
        finally:
            ours.close()
            init.close()

    def _arguments(self, job: Job, info_fd: int) -> list[str]:
        """bwrap's options for `job`, in the order in which they apply."""
        words = ["--unshare-all", "--unshare-user", "--disable-userns", "--uid", "1000", "--gid", "1000"]
        words += ["--die-with-parent", "--new-session", "--hostname", "sandbox", "--cap-drop", "ALL", "--clearenv"]
        words += ["--info-fd", str(info_fd), "--ro-bind", "/usr", "/usr"]
        for link in SYSTEM_LINKS:
            if os.path.islink(link):
                words += ["--symlink", os.readlink(link), link]
            elif os.path.isdir(link):
                words += ["--ro-bind", link, link]
        words += ["--proc", "/proc", "--dev", "/dev"]
        for folder in ("/tmp", "/dev/shm"):
            words += ["--size", str(job.limits.workspace_bytes), "--tmpfs", folder]
        words += ["--remount-ro", "/dev"]
        words += ["--tmpfs", "/etc"]
        for shared in SHARED_ETC:
            words += ["--ro-bind-try", shared, shared]
        for file in sorted(ETC.iterdir()):
            words += ["--ro-bind", str(file), f"/etc/{file.name}"]
        words += ["--ro-bind", str(LAUNCHER), str(OPT / "launcher.py")]
        for mount in [*self._python_mounts, *job.mounts]:
            words += ["--bind" if mount.writable else "--ro-bind", str(mount.source), str(mount.target)]
        words += ["--remount-ro", "/etc", "--remount-ro", "/", "--chdir", str(job.workdir)]
        path = f"{OPT}/node/bin:/usr/local/bin:/usr/bin:/bin:{Path(self._python).parent}"
        for key, value in {"PATH": path, "HOME": str(job.home), "LANG": "C.UTF-8", **job.env}.items():
            words += ["--setenv", key, value]
        return words


class _InitProcess:
    """The namespace's first process, as the host knows it: when it is gone, every process of the job is."""

    def __init__(self, info_read: int) -> None:
        self._info_read = info_read
        self._pidfd: int | None = None

    def gone(self) -> asyncio.Future[None] | None:
        """A future that is done when the kernel has ended the whole namespace; None when it never began."""
        with open(os.dup(self._info_read), "rb") as handle:
            text = handle.read()
        try:
            self._pidfd = os.pidfd_open(int(json.loads(text)["child-pid"]))
        except (ValueError, KeyError, ProcessLookupError):
            return None
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        pidfd = self._pidfd

        def ended() -> None:
            loop.remove_reader(pidfd)
            future.set_result(None)

        loop.add_reader(pidfd, ended)
        return future

    def close(self) -> None:
        """Close both descriptors."""
        os.close(self._info_read)
        if self._pidfd is not None:
            with contextlib.suppress(OSError):
                os.close(self._pidfd)


def _memory_file(text: str) -> int:
    """A descriptor that reads as `text`."""
    fd = os.memfd_create("turngate-bwrap")
    os.write(fd, text.encode())
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _find_python() -> tuple[str, list[Mount]]:
    """A Python under /usr, or else this one's own installation, shown at its own path."""
    found = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    if found is not None and Path(found).resolve().is_relative_to("/usr"):
        return found, []
    base = Path(sys.base_prefix)
    return str(base / "bin" / "python3"), [Mount(base, PurePosixPath(base))]
