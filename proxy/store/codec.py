"""Turns as SQLite rows and back: packed arrays, compressed JSON, and a digest taken before anything is written.

Pure functions on values. A turn costs what it adds: `tools`, the same in every turn of a session, are kept once by
content hash. The codec never changes a token, a log-prob or a string: unpack(pack(turn)) is the same turn.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import zstandard
from numpy.typing import NDArray

from turngate.proxy.rows import Row
from turngate.proxy.turns import Span, Timings, Turn

COLUMNS = (
    *("id", "rollout", "seq", "kind", "base", "base_tokens", "break_cause", "label", "label_reason", "mode"),
    *("engine", "finish_reason", "policy", "version", "prompt_tokens", "completion_tokens", "received_at_ns"),
    *("tail_ids", "completion_ids", "logprobs", "top_k", "top_ids", "top_logprobs"),
    *("body", "request", "response", "tools", "digest"),
)
_RAW, _ZSTD = b"\0", b"\1"
_LEVEL = 3
_SMALL_BYTES = 64
_OF_THREAD = threading.local()


@dataclass(frozen=True, slots=True)
class PackedTurn:
    """A row of the turns table (in `COLUMNS` order), and the content behind its `tools` hash."""

    values: tuple[Any, ...]
    tools_hash: bytes | None
    tools_json: bytes | None

    @property
    def size_bytes(self) -> int:
        """About how much a row takes."""
        return sum(len(value) for value in self.values if type(value) is bytes) + len(self.tools_json or b"")


def pack(turn: Turn) -> PackedTurn:
    """The row that stands for `turn`.

    Raises:
        TypeError: a request, response or sampling value is not JSON.
    """
    tools = turn.request.get("tools") or None
    request = {key: value for key, value in turn.request.items() if key != "tools" or tools is None}
    tools_json = None if tools is None else dumps(tools)
    tools_hash = None if tools_json is None else hashlib.blake2b(tools_json, digest_size=16).digest()
    span = turn.spans[0] if turn.spans else None
    top_ids, top_logprobs = turn.top_ids, turn.top_logprobs
    values = (
        *(turn.id, turn.rollout, turn.seq, turn.kind, turn.base, turn.base_tokens, turn.break_cause),
        *(turn.label, turn.label_reason, turn.mode, turn.engine, turn.finish_reason),
        *(span.policy if span else None, span.version if span else None),
        *(turn.prompt_tokens, len(turn.completion_ids), turn.timings.received_at_ns),
        pack_array(turn.tail_ids, "<i4"),
        pack_array(turn.completion_ids, "<i4"),
        pack_array(turn.logprobs, "<f4"),
        None if top_ids is None else int(top_ids.shape[1]),
        None if top_ids is None else pack_array(top_ids, "<i4"),
        None if top_logprobs is None else pack_array(top_logprobs, "<f2"),
        squeeze(dumps(_body(turn))),
        squeeze(dumps(request)),
        squeeze(dumps(dict(turn.response))),
        tools_hash,
        turn_digest(turn),
    )
    return PackedTurn(values, tools_hash, tools_json)


def unpack(row: Mapping[str, Any], tools_of: Callable[[bytes], Any]) -> Turn:
    """The turn that `row` stands for; `tools_of(hash)` gives the tool list kept under a content hash."""
    body = loads(expand(row["body"]))
    request = loads(expand(row["request"]))
    if row["tools"] is not None:
        request["tools"] = tools_of(row["tools"])
    top_k = row["top_k"]
    return Turn(
        **{key: row[key] for key in ("id", "rollout", "seq", "kind", "base", "base_tokens", "break_cause")},
        **{key: row[key] for key in ("label", "label_reason", "mode", "engine", "finish_reason")},
        tail_ids=unpack_array(row["tail_ids"], "<i4").astype(np.int32),
        completion_ids=unpack_array(row["completion_ids"], "<i4").astype(np.int32),
        logprobs=unpack_array(row["logprobs"], "<f4").astype(np.float32),
        top_ids=None if top_k is None else unpack_array(row["top_ids"], "<i4").astype(np.int32).reshape(-1, top_k),
        top_logprobs=None
        if row["top_logprobs"] is None
        else unpack_array(row["top_logprobs"], "<f2").astype(np.float16).reshape(-1, top_k),
        spans=tuple(Span(*span) for span in body["spans"]),
        stop_reason=body["stop_reason"],
        timings=Timings(*body["timings"]),
        sampling_asked=body["sampling_asked"],
        sampling_used=body["sampling_used"],
        flags=tuple(body["flags"]),
        agent=body.get("agent"),
        parent=body.get("parent"),
        request=request,
        response=loads(expand(row["response"])),
    )


def turn_digest(turn: Turn) -> bytes:
    """blake2b-128 over everything a turn is: ids, log-probs, base, spans, texts. Independent of how it is stored."""
    head = [turn.id, turn.rollout, turn.seq, turn.kind, turn.base, turn.base_tokens, turn.break_cause]
    head += [turn.label, turn.label_reason, turn.mode, turn.engine, turn.finish_reason]
    digest = hashlib.blake2b(digest_size=16, person=b"turngate-turn-1")
    for part in (
        dumps(head),
        np.ascontiguousarray(turn.tail_ids, "<i4").tobytes(),
        np.ascontiguousarray(turn.completion_ids, "<i4").tobytes(),
        np.ascontiguousarray(turn.logprobs, "<f4").tobytes(),
        b"" if turn.top_ids is None else np.ascontiguousarray(turn.top_ids, "<i4").tobytes(),
        b"" if turn.top_logprobs is None else np.ascontiguousarray(turn.top_logprobs, "<f2").tobytes(),
        dumps([_body(turn), turn.request, turn.response], sort=True),
    ):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def row_digest(row: Row) -> bytes:
    """blake2b-128 over a training row: its turns, ids, mask, log-probs and versions."""
    digest = hashlib.blake2b(digest_size=16, person=b"turngate-row-1")
    for part in (
        dumps([row.rollout, list(row.turns)]),
        np.ascontiguousarray(row.ids, "<i4").tobytes(),
        np.ascontiguousarray(row.mask, "u1").tobytes(),
        np.ascontiguousarray(row.logprobs, "<f4").tobytes(),
        np.ascontiguousarray(row.versions, "<i4").tobytes(),
    ):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def seal_digest(digests: Iterable[bytes]) -> bytes:
    """blake2b-128 over the digests of a rollout's turns, in order."""
    return hashlib.blake2b(b"".join(digests), digest_size=16, person=b"turngate-seal-1").digest()


def pack_array(array: NDArray[Any], dtype: str) -> bytes:
    """Little-endian bytes of `array`, compressed where that is smaller."""
    return squeeze(np.ascontiguousarray(array, dtype=dtype).tobytes())


def unpack_array(data: bytes, dtype: str) -> NDArray[Any]:
    """The flat array behind `pack_array`."""
    return np.frombuffer(expand(data), dtype=dtype)


def squeeze(data: bytes) -> bytes:
    """`data` behind one byte that says whether it is compressed (zstd)."""
    if len(data) > _SMALL_BYTES:
        packed = _compressor().compress(data)
        if len(packed) < len(data):
            return _ZSTD + packed
    return _RAW + data


def _compressor() -> zstandard.ZstdCompressor:
    """The thread's own: making one costs more than most of what it compresses."""
    found: zstandard.ZstdCompressor | None = getattr(_OF_THREAD, "compressor", None)
    if found is None:
        found = _OF_THREAD.compressor = zstandard.ZstdCompressor(level=_LEVEL)
    return found


def expand(data: bytes) -> bytes:
    """What `squeeze` was given.

    Raises:
        ValueError: these bytes were not made by `squeeze`.
    """
    if data[:1] == _RAW:
        return data[1:]
    if data[:1] != _ZSTD:
        raise ValueError("unknown packing of a stored value")
    try:
        return zstandard.ZstdDecompressor().decompress(data[1:])
    except zstandard.ZstdError as error:
        raise ValueError(f"a stored value cannot be decompressed: {error}") from error


def dumps(value: Any, *, sort: bool = False) -> bytes:
    """JSON bytes. Lone surrogates and integers beyond 64 bits, which agents do send, need the slower encoder; a
    leading space (still JSON) then tells `loads` to use the slower decoder, because orjson would make floats of them.
    """
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS if sort else None)
    except TypeError:
        return b" " + json.dumps(value, sort_keys=sort, default=_plain, separators=(",", ":")).encode()


def loads(data: bytes) -> Any:
    """The value of JSON bytes made by `dumps`."""
    return json.loads(data) if data[:1] == b" " else orjson.loads(data)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not JSON and cannot be stored")


def _body(turn: Turn) -> dict[str, Any]:
    """What a turn holds besides columns, arrays and texts."""
    timings = turn.timings
    return {
        "spans": [_span(span) for span in turn.spans],
        "stop_reason": turn.stop_reason,
        "timings": [
            *(timings.received_at_ns, timings.received_ns, timings.dispatched_ns),
            *(timings.first_token_ns, timings.done_ns),
        ],
        "sampling_asked": dict(turn.sampling_asked),
        "sampling_used": dict(turn.sampling_used),
        "flags": list(turn.flags),
        **{key: value for key, value in (("agent", turn.agent), ("parent", turn.parent)) if value is not None},
    }


def _span(span: Span) -> list[Any]:
    """The engine only where it is told, so that turns of one engine keep the digests they always had."""
    values = [span.start, span.end, span.policy, span.version, span.adapter]
    return [*values, span.engine] if span.engine else values
