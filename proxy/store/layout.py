"""A store is a folder; this says which file lies where and what run it belongs to.

`store.json` (format, run id, creation time, what the model's stop tokens are), `tokenizer.json` (once a run),
`control.sqlite` (one owner), `turns-<k>.sqlite` (owned by worker k). It never opens a database itself.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import orjson

from turngate.proxy.store.errors import Invalid, SchemaTooNew, StoreDamaged, StoreError, StoreMissing

FORMAT = 1
MARKER = "store.json"


@dataclass(frozen=True, slots=True)
class StoreFolder:
    """The paths of the store at `path`, and the few facts about it that are no table's."""

    path: Path

    @classmethod
    def create(cls, path: Path, run: str, now_ns: int) -> Self:
        """The store at `path`, made when there is none, for its user alone; an existing one keeps its run id and mode.

        Raises:
            Invalid: the run id would not do in an adapter's name.
            SchemaTooNew, StoreDamaged: what is there cannot be used.
            StoreError: the folder or a file in it cannot be made.
        """
        folder = cls(path)
        if not folder._marker.exists():
            if not run or not all(c.isalnum() or c in "-_." for c in run):
                raise Invalid(f"run id {run!r}: use letters, digits, '-', '_' and '.'; adapter names carry it")
            try:
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
                _write(folder._marker, orjson.dumps({"format": FORMAT, "run": run, "created_at_ns": now_ns}))
            except OSError as error:
                todo = "free some" if error.errno == errno.ENOSPC else "name a folder that this user may write"
                raise StoreError(f"no store can be made at {path}: {error.strerror}; {todo}") from error
        folder.facts()
        return folder

    @classmethod
    def find(cls, path: str | Path) -> Self:
        """The store at `path`, or at `path/store` when `path` is a run's folder.

        Raises:
            StoreMissing: there is none. SchemaTooNew, StoreDamaged: it cannot be used.
        """
        for candidate in (Path(path), Path(path) / "store"):
            if (candidate / MARKER).exists():
                folder = cls(candidate)
                folder.facts()
                return folder
        raise StoreMissing(f"{path} is neither a store (no {MARKER}) nor a run folder (no store/{MARKER})")

    def facts(self) -> dict[str, Any]:
        """`store.json`: `format`, `run`, `created_at_ns`, and what `note` added.

        Raises:
            StoreMissing: there is no store. SchemaTooNew, StoreDamaged: it cannot be used.
        """
        try:
            facts = orjson.loads(self._marker.read_bytes())
        except FileNotFoundError as error:
            raise StoreMissing(f"{self.path} is not a store: it has no {MARKER}") from error
        except orjson.JSONDecodeError as error:
            raise StoreDamaged(f"{self._marker} is not JSON: {error}") from error
        if not isinstance(facts, dict) or not isinstance(facts.get("format"), int):
            raise StoreDamaged(f"{self._marker} does not say its format")
        if facts["format"] > FORMAT:
            raise SchemaTooNew(
                f"{self.path} has store format {facts['format']}, this turngate knows up to {FORMAT}; use the release "
                "that wrote it, or a later one"
            )
        return facts

    def note(self, **facts: Any) -> None:
        """Add facts of the run (JSON values), such as `base_model`; later ones win."""
        known = self.facts()
        if any(key not in known or known[key] != value for key, value in facts.items()):
            _write(self._marker, orjson.dumps({**known, **facts}))

    @property
    def run(self) -> str:
        """The run's id."""
        return str(self.facts().get("run", ""))

    @property
    def control(self) -> Path:
        """The control store's file."""
        return self.path / "control.sqlite"

    def turns(self, worker: int = 0) -> Path:
        """The turn store's file of a gateway worker."""
        return self.path / f"turns-{worker}.sqlite"

    def all_turns(self) -> list[Path]:
        """The turn files there are, by worker."""
        return sorted(self.path.glob("turns-*.sqlite"), key=lambda file: int(file.stem.partition("-")[2]))

    @property
    def tokenizer(self) -> Path:
        """The model's `tokenizer.json`, kept once so that text can be shown offline."""
        return self.path / "tokenizer.json"

    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a turn of this run's model, as far as they were noted."""
        return frozenset(int(token) for token in self.facts().get("stop_ids", ()))

    def keep_stop_ids(self, ids: Iterable[int]) -> None:
        """Note more tokens that end a turn."""
        self.note(stop_ids=sorted(self.stop_ids() | {int(token) for token in ids}))

    @property
    def _marker(self) -> Path:
        return self.path / MARKER


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all, and on the disk before it counts."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)  # there where the disk is full
