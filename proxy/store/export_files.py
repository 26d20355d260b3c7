"""Records to files that `datasets.load_dataset` reads: JSON lines, and Parquet with one fixed schema.

A file appears whole or not at all: it is written beside its place and moved there at the end.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped]

BATCH = 128  # records held at once, and a Parquet row group

_WHOLE = ("seq", "base_tokens", "version", "row", "trained_in_step", "turns", "spliced", "breaks", "prompt_tokens")
_INT64 = frozenset({*_WHOLE, "completion_tokens", "created_at_ns", "finished_at_ns", "received_at_ns"})
_FLOAT64 = frozenset({"reward", "dispatched_after_s", "first_token_after_s", "done_after_s"})
_INT32_LISTS = frozenset({"ids", "versions", "tail_ids", "completion_ids", "prompt_ids"})


def write_jsonl(records: Iterable[dict[str, Any]], path: Path) -> int:
    """Write one JSON object a line; `-` is standard output. Returns how many."""
    if str(path) == "-":
        return _lines(records, sys.stdout.buffer)
    with _whole(path) as partial, open(partial, "wb") as file:
        return _lines(records, file)


def write_parquet(records: Iterable[dict[str, Any]], path: Path) -> int:
    """Write Parquet; the schema follows from the first record's keys, its types from this module. Returns how many.

    Raises:
        ModuleNotFoundError: pyarrow is not installed (extra `export`).
    """
    import pyarrow as pa
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    rows, count = iter(records), 0
    with _whole(path) as partial:
        batch = list(islice(rows, BATCH))
        schema = pa.schema([(key, _type(key, batch[0][key])) for key in batch[0]] if batch else [])
        with pq.ParquetWriter(partial, schema, compression="zstd") as writer:
            while batch:
                writer.write_table(pa.Table.from_pylist(batch, schema=schema))
                count += len(batch)
                batch = list(islice(rows, BATCH))
    return count


def _type(key: str, example: Any) -> pa.DataType:
    import pyarrow as pa

    if key in _INT32_LISTS:
        return pa.list_(pa.int32())
    if key == "logprobs":
        return pa.list_(pa.float32())
    if key == "mask":
        return pa.list_(pa.bool_())
    if isinstance(example, list):
        return pa.list_(pa.string())
    if isinstance(example, bool):
        return pa.bool_()
    if key in _FLOAT64:
        return pa.float64()
    return pa.int64() if key in _INT64 else pa.string()


def _lines(records: Iterable[dict[str, Any]], file: Any) -> int:
    count = 0
    for count, record in enumerate(records, 1):  # noqa: B007
        file.write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))
    file.flush()
    return count


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
