"""The sandbox protocol: run one job under limits and a deadline, and be sure that nothing of it is left.

Values and the protocol only. `bubblewrap.py` isolates; `process.py` does not and says so; containers fit behind the
same few methods. A job must never see the host's environment, and never more network than the gateway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Protocol

from pydantic import BaseModel, ConfigDict, Field

from turngate.harnesses.base import Places
from turngate.harnesses.install import Installed

OPT = PurePosixPath("/opt/turngate")
"""Where an isolated sandbox shows what the project brings: harness, node, launcher."""


class Limits(BaseModel):
    """What one sandbox may use."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    memory_bytes: int = Field(4 << 30, ge=1 << 26, description="private memory of each process")
    file_bytes: int = Field(256 << 20, ge=1 << 10, description="largest file a process may write")
    workspace_bytes: int = Field(512 << 20, ge=1 << 10, description="largest workspace a verifier is run on")
    processes: int = Field(512, ge=8, description="processes and threads of a sandbox (the kernel exempts root)")
    open_files: int = Field(1024, ge=64, description="open files of each process")
    cpu_s: int = Field(3600, ge=1, description="CPU seconds of each process")
    output_bytes: int = Field(1 << 20, ge=1 << 10, description="how much of stdout and of stderr is kept")


@dataclass(frozen=True, slots=True)
class Mount:
    """A host path shown inside the sandbox."""

    source: Path
    target: PurePosixPath
    writable: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """One command in a sandbox. `gateway` is the only address it may reach; None means no network at all."""

    argv: Sequence[str]
    env: Mapping[str, str]
    mounts: Sequence[Mount]
    home: PurePosixPath
    workdir: PurePosixPath
    deadline_s: float
    gateway: tuple[str, int] | None = None
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class Finished:
    """How a job ended. `exit_code` is negative for a signal; texts are cut to `Limits.output_bytes`."""

    exit_code: int
    stdout: str
    stderr: str
    timed_out: bool
    seconds: float


class Sandbox(Protocol):
    """A way to run jobs. `isolated` says whether a hostile job is contained."""

    name: str
    isolated: bool

    def check(self) -> None:
        """Raise `SandboxUnavailable`, saying what is missing, if jobs cannot run here."""

    def places(self, installed: Installed | None, home: Path, workspace: Path, workdir: PurePosixPath) -> Places:
        """Where a job sees these host folders; `workdir` is where the task wants its workspace."""

    def path(self, host: Path, wanted: PurePosixPath) -> PurePosixPath:
        """Where a job sees the mounted host path `host` that should appear as `wanted`."""

    def gateway_url(self, base_url: str) -> str:
        """The session's base URL as a job must use it."""

    async def run(self, job: Job) -> Finished:
        """Run to the end or the deadline; on return, or when cancelled, every process of the job is gone.

        Raises:
            Fault: with cause `sandbox_start` when the job could not be started.
        """
