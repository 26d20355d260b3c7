"""Folders of rollouts on the host: made before a run, copied for the verifier, removed after, reaped after a crash.

An agent may leave links, pipes, and folders without permissions. Nothing here follows a link or opens anything but a
regular file, so what an agent leaves can neither leak nor overwrite a file of the host.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from turngate.harnesses.disk import mount_tmpfs, unmount_below
from turngate.harnesses.errors import Fault, SandboxUnavailable, SettingsWrong
from turngate.harnesses.sandbox import Limits
from turngate.tasks.harbor import IMAGE_FILES

PREFIX = "turngate-run-"
LOCK = "owner.lock"
ENTRY_BYTES = 4096
"""What each name counts for when a workspace is copied, so that empty files and folders are limited too."""


@dataclass(frozen=True, slots=True)
class Folders:
    """Host folders of one rollout: the agent's (`home`, `workspace`) and the verifier's (`judged`, `rewards`)."""

    root: Path
    home: Path
    workspace: Path
    judged: Path
    rewards: Path


class Scratch:
    """A run's own folder for rollouts; folders of runs whose owner died are removed when the next one begins."""

    def __init__(self, parent: Path | None = None, limits: Limits | None = None) -> None:
        self._parent = parent or Path(tempfile.gettempdir())
        self._limits = limits or Limits()
        self._root: Path | None = None
        self._lock: IO[str] | None = None
        self._why_soft = "limits.disk is `watch`"
        self.hard = False

    def __enter__(self) -> Self:
        try:
            self._parent.mkdir(parents=True, exist_ok=True)
            reap_scratch(self._parent)
            self._root = Path(tempfile.mkdtemp(prefix=PREFIX, dir=self._parent))
        except OSError as error:
            raise SettingsWrong(f"scratch: {self._parent} cannot be written: {error.strerror}") from error
        self._lock = (self._root / LOCK).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            if self._limits.disk != "watch":
                self._try_tmpfs(self._root / "probe")
        except SandboxUnavailable:
            self.__exit__()
            raise
        return self

    @property
    def root(self) -> Path:
        """The run's own folder."""
        assert self._root is not None, "use Scratch as a context manager"
        return self._root

    def unenforced(self) -> list[str]:
        """What of the disk limit cannot be held here."""
        if self.hard:
            return []
        return [f"disk: watched, not held; a file deleted while open is not seen ({self._why_soft})"]

    def watched(self, *folders: Path) -> tuple[Path, ...]:
        """Those of `folders` whose size must be watched while a job runs."""
        return () if self.hard else folders

    def __exit__(self, *_: object) -> None:
        if self._root is not None:
            remove_rollout(self._root)
        if self._lock is not None:
            self._lock.close()

    def folders(self, rollout: str, files: Path | None) -> Folders:
        """Fresh folders for one rollout, its workspace filled from `files`.

        Raises:
            Fault: `sandbox_start` when the files do not fit.
        """
        root = self.root / rollout
        agent, judge = root / "agent", root / "judge"
        made = Folders(root, agent / "home", agent / "workspace", judge / "judged", judge / "rewards")
        try:
            for folder in (root, agent, judge):
                folder.mkdir()
            if self.hard:
                mount_tmpfs(agent, self._limits.workspace_bytes)
                mount_tmpfs(judge, 2 * self._limits.workspace_bytes)
            made.home.mkdir()
            made.rewards.mkdir()
            if files is not None:
                shutil.copytree(files, made.workspace, symlinks=True, ignore=_image_files(files))
            else:
                made.workspace.mkdir()
        except (OSError, shutil.Error) as error:
            remove_rollout(root)
            raise Fault("sandbox_start", f"cannot make the workspace: {error}") from error
        return made

    def _try_tmpfs(self, probe: Path) -> None:
        """Find out whether this user may mount.

        Raises:
            SandboxUnavailable: not, and the settings ask for it.
        """
        probe.mkdir()
        try:
            mount_tmpfs(probe, 1 << 16)
            self.hard = True
        except OSError as error:
            self._why_soft = f"mounting needs root: {error.strerror}"
            if self._limits.disk == "tmpfs":
                raise SandboxUnavailable(
                    f"limits.disk is tmpfs, but this user cannot mount one ({error.strerror}); set it to auto or watch"
                ) from error
        finally:
            remove_rollout(probe)


def remove_rollout(root: Path) -> None:
    """Unmount what is mounted in a rollout's folder, then remove it."""
    unmount_below(root)
    remove_tree(root)


def reap_scratch(parent: Path) -> int:
    """Remove scratch folders whose owner is gone; how many."""
    reaped = 0
    for root in parent.glob(f"{PREFIX}*"):
        try:
            with (root / LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_rollout(root)
                reaped += 1
        except OSError:
            continue
    return reaped


def write_home(home: Path, files: dict[str, str]) -> None:
    """Write configuration files, private to the user."""
    for name, text in files.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        path.chmod(0o600)


def copy_workspace(source: Path, target: Path, limit_bytes: int) -> None:
    """Copy regular files, folders and links (as links); pipes, sockets and devices are left out.

    Raises:
        Fault: `workspace_invalid` when it is larger than `limit_bytes` or cannot be read.
    """
    left = limit_bytes
    pending = [(source, target)]
    try:
        while pending:
            here, there = pending.pop()
            here.chmod(0o700)
            there.mkdir()
            for entry in os.scandir(here):
                mode = entry.stat(follow_symlinks=False).st_mode
                left -= ENTRY_BYTES
                if left < 0:
                    raise Fault("workspace_invalid", f"more than Limits.workspace_bytes allows, at {entry.name}")
                copy = there / entry.name
                if stat.S_ISDIR(mode):
                    pending.append((Path(entry.path), copy))
                elif stat.S_ISLNK(mode):
                    copy.symlink_to(os.readlink(entry.path))
                elif stat.S_ISREG(mode):
                    left -= _copy_file(Path(entry.path), copy, stat.S_IMODE(mode), left)
    except OSError as error:
        raise Fault("workspace_invalid", f"cannot copy the workspace: {error}") from error


def _copy_file(source: Path, target: Path, mode: int, left_bytes: int) -> int:
    """Copy one file by what it occupies, not by what a sparse file claims; the bytes counted."""
    if not mode & stat.S_IRUSR:
        source.chmod(mode | stat.S_IRUSR)
    size = source.lstat().st_size
    if size > left_bytes:
        raise Fault("workspace_invalid", f"more bytes than Limits.workspace_bytes allows, at {source.name}")
    with source.open("rb") as read, target.open("xb") as write:
        shutil.copyfileobj(read, write)
    target.chmod(mode & 0o777)
    return size


def write_answer(workspace: Path, name: str, text: str) -> None:
    """Put the final answer into the workspace, replacing whatever the agent left under that name."""
    path = workspace / name
    if path.is_dir() and not path.is_symlink():
        remove_tree(path)
    else:
        path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    with open(fd, "w", encoding="utf-8") as handle:
        handle.write(text)


def remove_tree(root: Path) -> None:
    """Remove a folder, also where permissions were taken away."""

    def retry(function: Callable[..., Any], path: str, _error: object) -> None:
        with suppress(OSError):
            os.chmod(os.path.dirname(path), 0o700)
            if not os.path.islink(path):
                os.chmod(path, 0o700)
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                os.unlink(path)

    with suppress(RecursionError):
        shutil.rmtree(root, onerror=retry)
    if root.exists():  # so deep, or so full of closed folders, that only the tools made for it get through
        for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
            subprocess.run([*command, "--", str(root)], capture_output=True, check=False)


def _image_files(top: Path) -> Callable[[str, list[str]], set[str]]:
    """Leave out the files that describe a container image, at the top only."""
    return lambda folder, names: {name for name in names if Path(folder) == top and name in IMAGE_FILES}
