"""Whether a run came out as it was written down before it: one line, and a sentence for each thing that did not.

Pure. Nothing is forgiven: a break that was expected and did not come is as wrong as one that came unexpected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bench.matrix.expectations import Expected


@dataclass(frozen=True)
class Heard:
    """A recorded turn: what the gateway called it and why, and what it truly was."""

    label: str
    reason: str
    truth: str


@dataclass(frozen=True)
class Seen:
    """What came of a run. `unmatched` are rows seen from outside that were not handed to training."""

    status: str
    causes: Mapping[str, int]
    heard: tuple[Heard, ...]
    rows: int
    exact_rows: int
    duplicates: int
    problems: tuple[str, ...]
    unmatched: int
    detail: str


@dataclass(frozen=True)
class Run:
    """One run: its line of output, the labels of its turns, and what was not as expected."""

    line: dict[str, Any]
    heard: tuple[Heard, ...]
    wrong: tuple[str, ...]
    held_out: bool


def judge(harness: str, scenario: str, expected: Expected, seen: Seen) -> Run:
    """The run's line, and what is wrong with it."""
    line = {
        "harness": harness,
        "scenario": scenario,
        "ok": True,
        "status": seen.status,
        "turns": len(seen.heard),
        "breaks": sum(seen.causes.values()),
        "break_causes": dict(seen.causes),
        "expected_breaks": expected.breaks,
        "labels": dict(Counter(one.label for one in seen.heard)),
        "rows": seen.rows,
        "exact_rows": seen.exact_rows,
        "duplicate_turns": seen.duplicates - expected.again,
    }
    wrong = _wrong(line, expected, seen)
    return Run({**line, "ok": not wrong}, seen.heard, tuple(wrong), expected.held_out)


def _wrong(line: Mapping[str, Any], expected: Expected, seen: Seen) -> list[str]:
    wanted = {
        "status": expected.status,
        "turns": expected.turns,
        "break_causes": expected.breaks,
        "labels": expected.labels,
        "rows": expected.rows,
        "exact_rows": line["rows"],
        "duplicate_turns": 0,
    }
    said = [f"{key} is {line[key]}, expected {value}" for key, value in wanted.items() if line[key] != value]
    said += [
        f"a {one.truth} turn is labelled {one.label}: {one.reason}" for one in seen.heard if one.label != one.truth
    ]
    said += [f"verify: {problem}" for problem in seen.problems]
    if seen.unmatched:
        said.append(f"{seen.unmatched} rows seen from outside were not handed to training")
    if said and seen.detail:
        said.append(seen.detail)
    return said
