"""Plain processes on the host: no isolation at all, for trusted tasks where bubblewrap cannot run.

The job sees the host's files and network with the user's rights. What it shares with the real sandboxes: an
environment of its own, limits, a deadline, and a guard that ends every descendant, also when the runner is killed.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path, PurePosixPath

from turngate.harnesses.base import Places
from turngate.harnesses.cgroups import Cgroup, Cgroups
from turngate.harnesses.install import Installed
from turngate.harnesses.pythons import base_python
from turngate.harnesses.sandbox import Finished, Ground, Job, Limits
from turngate.harnesses.spawn import LAUNCHER, Spawn, in_cgroup, launcher_words, run_spawned, unheld
from turngate.tasks.harbor import Task


class PlainProcess:
    """See `turngate.harnesses.sandbox.Sandbox`; mounts are used where they are, `wanted` paths do not exist."""

    name = "process"
    isolated = False

    def __init__(self, cgroups: Cgroups | None = None) -> None:
        self._cgroups = cgroups or Cgroups.none()

    def check(self) -> None:
        """Always possible."""

    def unenforced(self, limits: Limits) -> list[str]:
        """Nothing is isolated, and without cgroups limits hold for each process only."""
        alone = "isolation: files, network and other rollouts are open to the agent in the sandbox `process`"
        return [alone, "disk: /tmp is the host's own", *unheld(self._cgroups, limits)]

    async def prepare(self, task: Task) -> Ground:
        """The task's files."""
        return Ground(task.environment if task.environment.is_dir() else None)

    def close(self) -> None:
        """Remove this runner's cgroups."""
        self._cgroups.close()

    def places(self, installed: Installed | None, home: Path, workspace: Path, workdir: PurePosixPath) -> Places:
        """The host's own paths."""
        package = PurePosixPath(installed.package) if installed else PurePosixPath("/")
        node = PurePosixPath(installed.node) / "bin" / "node" if installed else PurePosixPath("node")
        python = PurePosixPath(installed.python if installed else base_python())
        return Places(package, node, PurePosixPath(home), PurePosixPath(workspace), python)

    def path(self, host: Path, wanted: PurePosixPath) -> PurePosixPath:
        """The host path itself."""
        return PurePosixPath(host)

    def gateway_url(self, base_url: str) -> str:
        """Unchanged: the host's network is the job's network."""
        return base_url

    async def run(self, job: Job) -> Finished:
        """See the protocol."""
        return await in_cgroup(self._cgroups, job.limits, lambda cgroup: self._run(job, cgroup))

    async def _run(self, job: Job, cgroup: Cgroup) -> Finished:
        ours, theirs = socket.socketpair()
        launch = [sys.executable, "-I", "-S", str(LAUNCHER)]
        spawn = Spawn(
            argv=cgroup.joining([*launch, *launcher_words(theirs.fileno(), job, port=0, guard=True)]),
            env={"PATH": os.environ.get("PATH", os.defpath), "HOME": str(job.home), "LANG": "C.UTF-8", **job.env},
            pass_fds=(theirs.detach(),),
            cwd=str(job.workdir),
            end=_close_control,
            gone=lambda: None,
        )
        try:
            return await run_spawned(job, spawn, ours)
        finally:
            ours.close()


def _close_control(pid: int, control: socket.socket) -> None:
    """The guard takes the closed socket as its order to end everything."""
    control.close()
