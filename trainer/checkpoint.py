"""Checkpoints that are whole or do not count: a marker with every file's digest, written last.

The Trainer writes adapter, optimizer, scheduler, random states and step; this adds the run's own state (lineage and
version) and seals the folder. A folder whose marker is missing or does not match is never resumed from.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

from turngate.trainer.errors import CheckpointTorn
from turngate.trainer.files import fsync_tree, write_json

log = logging.getLogger(__name__)

MARKER = "complete.json"
RUN_STATE = "turngate.json"
PREFIX = "checkpoint-"


@dataclass(frozen=True, slots=True)
class RunState:
    """What a resumed trainer must know besides its tensors.

    `version` is the newest published version (0: the base) and `holds` says whether these are its weights (not so after
    a publication failed). `lineage` maps each group trained so far to its step.
    """

    step: int
    version: int
    policy: str
    holds: bool = True
    lineage: dict[str, int] = field(default_factory=dict)


def folder_of(root: Path, step: int) -> Path:
    """Where the checkpoint of `step` lies."""
    return root / f"{PREFIX}{step}"


def seal(folder: Path, state: RunState) -> None:
    """Add the run's state to a written checkpoint, flush it all, and mark it complete."""
    write_json(folder / RUN_STATE, asdict(state))
    fsync_tree(folder)
    files = {str(p.relative_to(folder)): _digest(p) for p in sorted(folder.rglob("*")) if p.is_file()}
    write_json(folder / MARKER, {"step": state.step, "files": files})
    fsync_tree(folder.parent, deep=False)


def verify(folder: Path) -> RunState:
    """Read a checkpoint's state after comparing every file with its digest.

    Raises:
        CheckpointTorn: the marker is missing, or a file is missing or differs.
    """
    try:
        files = json.loads((folder / MARKER).read_text())["files"]
        for name, digest in files.items():
            if _digest(folder / name) != digest:
                raise CheckpointTorn(f"{folder / name} differs from its digest in {MARKER}")
        return RunState(**json.loads((folder / RUN_STATE).read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointTorn(f"{folder} is not a complete checkpoint: {error}") from error


def newest_complete(root: Path) -> tuple[Path, RunState] | None:
    """The complete checkpoint of the highest step in `root`, passing over torn ones; None when there is none."""
    for folder in sorted(_folders(root), key=_step, reverse=True):
        try:
            return folder, verify(folder)
        except CheckpointTorn as torn:
            log.warning("%s; falling back to the checkpoint before it", torn)
    return None


def prune(root: Path, keep: int) -> None:
    """Delete the oldest sealed checkpoints beyond `keep`, and torn ones older than those kept."""
    newest_first = sorted(_folders(root), key=_step, reverse=True)
    sealed = [folder for folder in newest_first if (folder / MARKER).exists()]
    if len(sealed) <= keep:
        return
    for folder in newest_first:
        if _step(folder) < _step(sealed[keep - 1]):
            (folder / MARKER).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)


def discard(folder: Path) -> None:
    """Remove what a killed process left where a checkpoint is about to be written; the marker goes first."""
    (folder / MARKER).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _folders(root: Path) -> list[Path]:
    return [f for f in root.glob(f"{PREFIX}*") if f.is_dir() and f.name.removeprefix(PREFIX).isdigit()]


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix(PREFIX))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
