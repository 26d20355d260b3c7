"""Files that survive a power cut: fsync of whole folders, and JSON written whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from turngate.trainer.errors import SettingsError


def output_folder(path: Path, setting: str) -> None:
    """Make the folder that is written to, before anything that takes long is done for it.

    Raises SettingsError when this user may not write there.
    """
    why = ""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = str(error.strerror)
    if why or not os.access(path, os.W_OK | os.X_OK):
        raise SettingsError(f"{setting}: {path} cannot be written: {why or 'permission denied, or a read-only disk'}")


def fsync_tree(folder: Path, *, deep: bool = True) -> None:
    """Flush a folder, and with `deep` everything below it, to the disk."""
    paths = [p for p in sorted(folder.rglob("*")) if not p.is_symlink()] if deep else []
    for path in [*paths, folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Write `value` beside `path`, flush it, then rename: a reader sees the old file or the new one."""
    draft = path.with_name(f".{path.name}.tmp")
    with draft.open("w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(draft, path)
    fsync_tree(path.parent, deep=False)
