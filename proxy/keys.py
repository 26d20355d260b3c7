"""Keys: the administration key in its file; the secrets of sessions, and which worker one names.

A session's secret is kept as its hash alone. The worker's number in it is no secret: it lets one port relay to the
right worker without a look-up.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from pathlib import Path

MIN_KEY_CHARS = 16
"""An administration key of fewer is refused; an empty one would let everybody in."""

_KEY = re.compile(r"\btg-[\w-]+")
_WORKER = re.compile(r"tg-w(\d{1,4})-")


def secret_prefix(worker: int | None) -> str:
    """How a secret begins: `tg-`, or `tg-w<k>-` where there are several workers."""
    return "tg-" if worker is None else f"tg-w{worker}-"


def worker_of(secret: str) -> int:
    """The worker that a secret names; 0 where it names none."""
    found = _WORKER.match(secret)
    return int(found.group(1)) if found else 0


def secret_digest(secret: str) -> bytes:
    """SHA-256 of a secret: the only form in which it is kept."""
    return hashlib.sha256(secret.encode()).digest()


def admin_key(path: Path) -> str:
    """The administration key in `path`; generated with mode 0600 when the file is missing.

    It is there whole or not at all: half a key, as a full disk or a kill would leave it, could be guessed.

    Raises:
        PermissionError: others can read the file, or what is in it keeps nobody out.
        OSError: it cannot be written or read.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_key(path)
    if path.stat().st_mode & 0o077:
        raise PermissionError(f"{path} can be read by others; chmod 600 it, or delete it for a new key")
    key = path.read_text(encoding="utf-8", errors="replace").strip()
    if len(key) < MIN_KEY_CHARS:
        raise PermissionError(
            f"the administration key in {path} has {len(key)} characters, {MIN_KEY_CHARS} are the least; delete the "
            "file for a new key"
        )
    return key


def _write_key(path: Path) -> None:
    """Make the file with a new key; one that another process made meanwhile stays."""
    made = path.with_name(f"{path.name}.{os.getpid()}")
    made.unlink(missing_ok=True)  # of a process that was killed here, and had the same number
    try:
        with os.fdopen(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"tg-admin-{secrets.token_hex(24)}\n")
            file.flush()
            os.fsync(file.fileno())
        if not path.exists():
            made.rename(path)
    finally:
        made.unlink(missing_ok=True)


def blank_keys(text: str) -> str:
    """`text`, told back to whoever wrote it, without what looks like a key: people write keys in wrong places."""
    return _KEY.sub("…", text)
