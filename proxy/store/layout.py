"""A store is a folder; this says which file lies where and what run it belongs to.

`store.json` (format, run id, creation time, what the model's stop tokens are), `tokenizer.json` (once a run),
`control.sqlite` (one owner), `turns-<k>.sqlite` (owned by worker k). It never opens a database itself.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import orjson

from turngate.proxy.store.errors import Invalid, SchemaTooNew, StoreDamaged, StoreMissing

FORMAT = 1
_MARKER = "store.json"


@dataclass(frozen=True, slots=True)
class StoreFolder:
    """The paths of one store. `run` is the run's id; `created_at_ns` is UTC."""

    path: Path
    run: str
    created_at_ns: int

    @classmethod
    def create(cls, path: Path, run: str, now_ns: int) -> Self:
        """The store at `path`, made when there is none; an existing one keeps its run id.

        Raises:
            SchemaTooNew, StoreDamaged: what is there cannot be used.
        """
        if (path / _MARKER).exists():
            return cls.open(path)
        if not run or not all(c.isalnum() or c in "-_." for c in run):
            raise Invalid(f"run id {run!r}: use letters, digits, '-', '_' and '.'; adapter names carry it")
        path.mkdir(parents=True, exist_ok=True)
        _write(path / _MARKER, orjson.dumps({"format": FORMAT, "run": run, "created_at_ns": now_ns}))
        return cls(path, run, now_ns)

    @classmethod
    def open(cls, path: Path) -> Self:
        """The store at `path`.

        Raises:
            StoreMissing: there is none. SchemaTooNew, StoreDamaged: it cannot be used.
        """
        meta = _read_marker(path / _MARKER)
        if int(meta.get("format", 0)) > FORMAT:
            raise SchemaTooNew(f"{path} has store format {meta['format']}, this turngate knows up to {FORMAT}")
        return cls(path, str(meta.get("run", "")), int(meta.get("created_at_ns", 0)))

    @classmethod
    def find(cls, path: str | Path) -> Self:
        """The store at `path`, or at `path/store` when `path` is a run's folder."""
        given = Path(path)
        for candidate in (given, given / "store"):
            if (candidate / _MARKER).exists():
                return cls.open(candidate)
        raise StoreMissing(f"{given} is neither a store (no {_MARKER}) nor a run folder (no store/{_MARKER})")

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

    def keep_tokenizer(self, text: bytes | str) -> None:
        """Keep the model's tokenizer; the first one stays."""
        if not self.tokenizer.exists():
            _write(self.tokenizer, text.encode() if isinstance(text, str) else text)

    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a turn of this run's model, as far as they were recorded."""
        return frozenset(int(token) for token in _read_marker(self.path / _MARKER).get("stop_ids", ()))

    def keep_stop_ids(self, ids: frozenset[int] | set[int]) -> None:
        """Add tokens that end a turn (from the model's generation config and tokenizer)."""
        meta = _read_marker(self.path / _MARKER)
        known = set(meta.get("stop_ids", ()))
        if not ids <= known:
            _write(self.path / _MARKER, orjson.dumps({**meta, "stop_ids": sorted(known | ids)}))


def _read_marker(path: Path) -> dict[str, Any]:
    try:
        meta = orjson.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise StoreMissing(f"{path.parent} is not a store: it has no {_MARKER}") from error
    except orjson.JSONDecodeError as error:
        raise StoreDamaged(f"{path} is not JSON: {error}") from error
    if not isinstance(meta, dict):
        raise StoreDamaged(f"{path} is not a JSON object")
    return meta


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all, and on the disk before it counts."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with open(partial, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
