"""How much a rollout may write: a file system of its own in memory where this user may mount one, else a watch.

A mounted tmpfs is hard: the agent gets "No space left on device" and goes on. A watch looks at the size every now and
then and ends the agent beyond it; it does not see files that are deleted but still open, so it is said to be soft.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import stat
import time
from collections.abc import Sequence
from pathlib import Path

MS_NOSUID, MS_NODEV, MNT_DETACH = 2, 4, 2
LOOK_EVERY_S = 0.5
SCAN_SHARE = 0.02
"""Most of one core that watching one rollout may take."""
ENTRY_BYTES = 512
"""What a name costs at least, so that empty files count too."""


def mount_tmpfs(folder: Path, size_bytes: int) -> None:
    """Mount a tmpfs of that size on `folder`.

    Raises:
        OSError: this user may not.
    """
    entries = max(16384, size_bytes // 4096)
    options = f"size={size_bytes},nr_inodes={entries},mode=0755"
    flags = ctypes.c_ulong(MS_NOSUID | MS_NODEV)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"turngate", os.fsencode(folder), b"tmpfs", flags, options.encode()) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(folder))


def unmount_below(root: Path) -> int:
    """Unmount every tmpfs of ours at or below `root`; how many. Never follows a link."""
    count = 0
    top = os.path.realpath(root.parent) + "/" + root.name
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        point = before.split()[4].encode().decode("unicode_escape")
        if after.split()[:2] == ["tmpfs", "turngate"] and (point == top or point.startswith(top + "/")):
            libc = ctypes.CDLL(None, use_errno=True)
            count += libc.umount2(os.fsencode(point), MNT_DETACH) == 0
    return count


def used_bytes(folders: Sequence[Path]) -> int | None:
    """What the folders occupy; None when a part of them cannot be looked at. Never follows a link."""
    total = 0
    for folder in folders:
        try:
            for _, names, files, fd in os.fwalk(folder, onerror=_unless_gone, follow_symlinks=False):
                total += ENTRY_BYTES * (len(names) + len(files))
                for name in files:
                    total += _blocks(name, fd)
        except (OSError, RecursionError):  # not to be entered, or so deep that looking ends
            return None
    return total


def _blocks(name: str, fd: int) -> int:
    try:
        found = os.stat(name, dir_fd=fd, follow_symlinks=False)
    except OSError:
        return 0
    return found.st_blocks * 512 if stat.S_ISREG(found.st_mode) else 0


def _unless_gone(error: OSError) -> None:
    """A folder may vanish while we look; one that may not be entered is another matter."""
    if isinstance(error, PermissionError):
        raise error


async def wait_until_full(folders: Sequence[Path], limit_bytes: int) -> None:
    """Return once the folders occupy more than the limit, or hide what they occupy."""
    while True:
        began = time.monotonic()
        used = await asyncio.to_thread(used_bytes, folders)
        if used is None or used > limit_bytes:
            return
        await asyncio.sleep(max(LOOK_EVERY_S, (time.monotonic() - began) / SCAN_SHARE))
