"""What `turngate export` writes, as plain dictionaries with the same keys and types in every line.

Nested values whose shape varies (requests, metrics, sampling) are JSON text, so that one schema fits all. Secrets are
in no record: sessions' keys are not stored, and anything that looks like one inside a text is blanked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from turngate.proxy.rows import build_rows
from turngate.proxy.store import codec
from turngate.proxy.store.errors import NotFound
from turngate.proxy.store.reader import StoreReader
from turngate.proxy.store.records import GroupRecord, RolloutFilter, RolloutRecord
from turngate.proxy.store.where import Where
from turngate.proxy.turns import Turn, by_id, full_messages, prompt_ids

SECRET = re.compile(r"\btg-(?:[a-z]+\d*-)?[0-9a-f]{48}\b")
BLANK = "tg-(blanked)"

Record = dict[str, Any]
Decode = Callable[[list[int]], str]


ALL = Where("")


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """`where` and `meant` select rollouts, both must hold; `labels` turns (empty: all). `text` decodes ids. `compact`
    keeps of each turn only what it added: no whole prompts, no repeated messages."""

    where: RolloutFilter | None = None
    meant: Where = ALL
    labels: frozenset[str] = frozenset()
    text: Decode | None = None
    compact: bool = False


def rollout_records(reader: StoreReader, options: ExportOptions) -> Iterator[Record]:
    """One record a rollout."""
    for record in reader.rollouts(options.where):
        if not options.meant.accepts(record):
            continue
        counts, group = reader.counts(record.id), _group(reader, record)
        yield {
            **_common(record, group),
            "version": record.version,
            "state": record.state,
            "training": record.new.training,
            "rewards": _json(record.rewards),
            "metrics": _json(record.metrics),
            "metadata": _json(record.new.metadata),
            "sampling": _json(record.new.sampling),
            "created_at_ns": record.created_at_ns,
            "finished_at_ns": record.finished_at_ns,
            "turns": counts.turns,
            "spliced": counts.spliced,
            "breaks": sum(counts.breaks.values()),
            "prompt_tokens": counts.prompt_tokens,
            "completion_tokens": counts.completion_tokens,
        }


def row_records(reader: StoreReader, options: ExportOptions) -> Iterator[Record]:
    """One record a training row: exactly what a trainer gets, whether or not one asked."""
    for record in reader.rollouts(options.where):
        if not options.meant.by_label and not options.meant.accepts(record):
            continue
        group = _group(reader, record)
        turns = reader.turns(record.id)
        label_of = {turn.id: turn.label for turn in turns}
        for number, row in enumerate(build_rows(turns, options.labels or record.new.trained_labels)):
            if not options.meant.accepts(record, label_of[row.turns[0]]):
                continue
            yield {
                **_common(record, group),
                "row": number,
                "turns": list(row.turns),
                "label": label_of[row.turns[0]],
                "ids": row.ids.tolist(),
                "mask": row.mask.tolist(),
                "logprobs": row.logprobs.tolist(),
                "versions": row.versions.tolist(),
                **({} if options.text is None else {"text": _clean(options.text(row.ids.tolist()))}),
            }


def turn_records(reader: StoreReader, options: ExportOptions) -> Iterator[Record]:
    """One record a turn, with its whole prompt unless `compact`."""
    for record in reader.rollouts(options.where):
        if not options.meant.by_label and not options.meant.accepts(record):
            continue
        group, turns = _group(reader, record), reader.turns(record.id)
        known = by_id(turns)
        for turn in turns:
            wanted = not options.labels or turn.label in options.labels
            if wanted and options.meant.accepts(record, turn.label):
                yield {**_common(record, group), **_turn(known, turn, options)}


def _turn(known: dict[str, Turn], turn: Turn, options: ExportOptions) -> Record:
    versions = np.full(len(turn.completion_ids), -1, dtype=np.int32)
    for span in turn.spans:
        versions[span.start : span.end] = span.version
    whole = None if options.compact else prompt_ids(known, turn).tolist()
    messages = list(turn.request.get("messages", ())) if options.compact else full_messages(known, turn)
    timings = turn.timings
    record = {
        **{key: getattr(turn, key) for key in ("seq", "kind", "base", "base_tokens", "break_cause", "label")},
        **{key: getattr(turn, key) for key in ("label_reason", "mode", "engine", "finish_reason")},
        "turn": turn.id,
        "agent": turn.agent,
        "parent": turn.parent,
        "stop_reason": None if turn.stop_reason is None else str(turn.stop_reason),
        "tail_ids": turn.tail_ids.tolist(),
        "completion_ids": turn.completion_ids.tolist(),
        "logprobs": turn.logprobs.tolist(),
        "versions": versions.tolist(),
        "messages": _json(messages),
        "tools": _json(turn.request.get("tools")),
        "response": _json(turn.response),
        "sampling_asked": _json(turn.sampling_asked),
        "sampling_used": _json(turn.sampling_used),
        "flags": list(turn.flags),
        "received_at_ns": timings.received_at_ns,
        "dispatched_after_s": (timings.dispatched_ns - timings.received_ns) / 1e9,
        "first_token_after_s": (timings.first_token_ns - timings.received_ns) / 1e9,
        "done_after_s": (timings.done_ns - timings.received_ns) / 1e9,
    }
    if whole is not None:
        record["prompt_ids"] = whole
    if options.text is not None:
        record["prompt_text"] = _clean(options.text(turn.tail_ids.tolist() if whole is None else whole))
        record["completion_text"] = _clean(options.text(turn.completion_ids.tolist()))
    return record


def _common(record: RolloutRecord, group: GroupRecord | None) -> Record:
    return {
        "rollout": record.id,
        "task": record.new.task,
        "group": record.new.group,
        "harness": record.new.harness,
        "policy": record.policy,
        "outcome": record.outcome,
        "cause": None if record.cause is None else _clean(record.cause),
        "reward": record.reward,
        "group_state": None if group is None else group.state,
        "trained_in_step": group.step if group is not None and group.state == "trained" else None,
    }


def _group(reader: StoreReader, record: RolloutRecord) -> GroupRecord | None:
    if record.new.group is None or not record.new.training:
        return None
    try:
        return reader.control.group(record.new.group)
    except NotFound:
        return None


def _json(value: Any) -> str:
    return _clean(codec.dumps(value).decode())


def _clean(text: str) -> str:
    return SECRET.sub(BLANK, text)
