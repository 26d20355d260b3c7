"""The sandbox protocol: run one job under limits and a deadline, and be sure that nothing of it is left.

Values and the protocol only. `bubblewrap.py` isolates; `process.py` does not and says so; containers fit behind the
same few methods. A job must never see the host's environment, and never more network than the gateway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, model_validator

from turngate.harnesses.base import Places
from turngate.harnesses.install import Installed
from turngate.tasks.harbor import Task

OPT = PurePosixPath("/opt/turngate")
"""Where an isolated sandbox shows what the project brings: harness, node, launcher."""


class Limits(BaseModel):
    """What one sandbox may use."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    strict: bool = Field(False, description="refuse to start where one of these cannot be enforced")
    memory_bytes: int = Field(4 << 30, ge=1 << 26, description="memory of a sandbox; without a cgroup, of each process")
    cpus: float | None = Field(None, gt=0, description="cores of a sandbox, e.g. 0.5; default: no limit")
    niceness: int = Field(
        10, ge=0, le=19, description="how far agents give way to engine, gateway and trainer on the same cores; 0: not"
    )
    file_bytes: int = Field(256 << 20, ge=1 << 10, description="largest file a process may write")
    workspace_bytes: int = Field(512 << 20, ge=1 << 10, description="workspace and home together, in a run and after")
    disk: Literal["auto", "tmpfs", "watch"] = Field(
        "auto",
        description="how the size of a workspace is held: `tmpfs` (hard, in memory, needs root), `watch` (its size is "
        "looked at, the agent ended beyond it), `auto` the first that works",
    )
    processes: int = Field(512, ge=8, description="processes and threads of a sandbox")
    open_files: int = Field(1024, ge=64, description="open files of each process")
    cpu_s: int = Field(3600, ge=1, description="CPU seconds of each process")
    output_bytes: int = Field(1 << 20, ge=1 << 10, description="how much of stdout and of stderr is kept")

    @model_validator(mode="before")
    @classmethod
    def _word(cls, value: Any) -> Any:
        """`limits: strict` is short for `limits: {strict: true}`."""
        return {"strict": True} if value == "strict" else value


@dataclass(frozen=True, slots=True)
class Ground:
    """What every rollout of a task stands on: the files its workspace starts with, and the image of its sandboxes."""

    files: Path | None = None
    image: str | None = None


@dataclass(frozen=True, slots=True)
class Mount:
    """A host path shown inside the sandbox."""

    source: Path
    target: PurePosixPath
    writable: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """One command in a sandbox. `gateway` is the only address it may reach; None means no network at all.

    `image` is what `Sandbox.prepare` said of the task. `disk` are host folders whose size is watched while it runs.
    """

    argv: Sequence[str]
    env: Mapping[str, str]
    mounts: Sequence[Mount]
    home: PurePosixPath
    workdir: PurePosixPath
    deadline_s: float
    gateway: tuple[str, int] | None = None
    limits: Limits = field(default_factory=Limits)
    image: str | None = None
    disk: Sequence[Path] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """How a job ended. `exit_code` is negative for a signal; texts are cut to `Limits.output_bytes`.

    `exceeded` names the limit for which it was ended (`disk_limit`), or is empty. `oom_kills` counts processes that the
    kernel ended for memory, where a cgroup can tell.
    """

    exit_code: int
    stdout: str
    stderr: str
    timed_out: bool
    seconds: float
    exceeded: str = ""
    oom_kills: int = 0


class Sandbox(Protocol):
    """A way to run jobs. `isolated` says whether a hostile job is contained."""

    name: str
    isolated: bool

    def check(self) -> None:
        """Raise `SandboxUnavailable`, saying what is missing, if jobs cannot run here."""

    def unenforced(self, limits: Limits) -> list[str]:
        """What of `limits` cannot be held here, a sentence each."""

    async def prepare(self, task: Task) -> Ground:
        """Make ready what jobs of `task` need, once; cheap when called again.

        Raises:
            Fault: `sandbox_start` when it cannot be made.
        """

    def close(self) -> None:
        """Give back what was made for this runner; no job runs any more."""

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
