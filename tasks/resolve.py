"""From what a user writes as `tasks` to a folder: a path, the sample set `words`, or a split of a generated set.

A generated set is written into the cache once for each version of its generator, whole or not at all, so that several
runs may ask for it at the same time.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from turngate.tasks.errors import TaskInvalid

HERE = Path(__file__).parent


def task_folder(spec: str | Path, cache: Path | None = None) -> Path:
    """The folder `spec` means: an existing path, `words`, or `dataops:SPLIT` with an optional seed, `dataops:train:7`.

    `cache`: default `$TURNGATE_CACHE`, or `~/.cache/turngate`. A missing path that names no set is returned as it is.

    Raises:
        TaskInvalid: `dataops` without a split, with an unknown one, or with a seed that is no number; or the cache
            cannot be written.
    """
    path, words = Path(spec), str(spec).split(":")
    if path.exists():
        return path
    if words[0] in ("dataops", "tasks/dataops"):
        return _generated(words, cache or _cache_dir())
    sample = HERE / path.name
    known = path in (Path(path.name), Path("tasks", path.name)) and any(sample.glob("*/task.toml"))
    return sample if known else path


def _generated(words: list[str], cache: Path) -> Path:
    """The folder of one split, written if it is not there."""
    from turngate.tasks.dataops import SPLITS, write_set

    splits = ("all", *SPLITS)
    split, seed = words[1] if len(words) > 1 else "", words[2] if len(words) > 2 else "0"
    if split not in splits or not seed.isdecimal() or len(words) > 3:
        wanted = ", ".join(f"dataops:{one}" for one in splits)
        raise TaskInvalid(f"tasks={':'.join(words)}: wanted {wanted}, or one of them and a seed, as dataops:train:7")
    folder = cache / "tasks" / f"dataops-{_version()}" / f"{split}-{int(seed)}"
    try:
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            made = Path(tempfile.mkdtemp(prefix=".writing-", dir=folder.parent))
            write_set(made, split, int(seed))
            made.chmod(0o755)
            try:
                made.rename(folder)
            except OSError:  # another run was faster
                shutil.rmtree(made)
    except OSError as error:
        raise TaskInvalid(f"cannot write tasks to {folder} ({error}); set TURNGATE_CACHE to another folder") from error
    return folder


def _version() -> str:
    """A digest of the generator's sources: changed code never finds an old set."""
    total = hashlib.sha256()
    for path in [HERE / "steps.py", *sorted((HERE / "dataops").glob("*.py"))]:
        total.update(path.name.encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:12]


def _cache_dir() -> Path:
    chosen = os.environ.get("TURNGATE_CACHE")
    return Path(chosen).expanduser().resolve() if chosen else Path.home() / ".cache" / "turngate"
