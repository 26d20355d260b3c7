"""What a template is, what it makes, and the checks it may ask for.

A template turns a seeded generator of randomness into a draft; everything else (file layout, reward, splits) is the
same for all. Expected values are computed here in Python, never by running the solution, so an oracle that earns 1 has
agreed with a second computation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from turngate.tasks.steps import Step

Check = dict[str, Any]
"""One entry of checks.json; see `check.py` for what each kind means."""


@dataclass(frozen=True, slots=True)
class Draft:
    """One task before it is written: `files` are the workspace's, by relative path."""

    instruction: str
    files: Mapping[str, str]
    checks: Sequence[Check]
    steps: Sequence[Step]


@dataclass(frozen=True, slots=True)
class Template:
    """`make(random, number)` gives task `number` (from 1) of this template; `level` runs from 1 to 4."""

    name: str
    level: int
    summary: str
    make: Callable[[Random, int], Draft]
    held_out: bool = False


def number(path: str, value: int | float | str) -> Check:
    """One number; half the credit where a few words stand beside it."""
    return {"kind": "number", "path": path, "value": str(value)}


def lines(path: str, wanted: Sequence[str], near: Sequence[Sequence[str]] = ()) -> Check:
    """Exactly these lines; `near` misses earn half."""
    return {
        "kind": "lines",
        "path": path,
        "lines": list(wanted),
        "near": [list(miss) for miss in near if list(miss) != list(wanted)],
    }


def table(path: str, rows: Sequence[Sequence[object]], near: Sequence[Sequence[Sequence[object]]] = ()) -> Check:
    """Exactly these CSV rows, header first; `near` misses earn half."""
    wanted = [[str(cell) for cell in row] for row in rows]
    misses = [[[str(cell) for cell in row] for row in miss] for miss in near]
    return {"kind": "table", "path": path, "rows": wanted, "near": [miss for miss in misses if miss != wanted]}


def pairs(path: str, wanted: Mapping[str, object]) -> Check:
    """`key=value` lines, credit for each key once two are right."""
    return {"kind": "pairs", "path": path, "pairs": {key: str(value) for key, value in wanted.items()}}


def settings(path: str, form: str, value: Mapping[str, Any]) -> Check:
    """A configuration file (`env`, `ini`, `json`) that means exactly this."""
    return {"kind": "settings", "path": path, "format": form, "value": dict(value)}


def same(path: str, text: str, *, gate: bool = False) -> Check:
    """The file holds exactly `text`; as a gate: it must not have been touched."""
    check = {"kind": "same", "path": path, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    return check | {"gate": True} if gate else check


def calls(
    path: str, cases: Sequence[tuple[str, Sequence[Any], Any]], replace: Mapping[str, Any] | None = None
) -> Check:
    """Functions of the module give these results: `(function, arguments, result)`, all or nothing."""
    return {"kind": "calls", "path": path, "cases": [list(case) for case in cases], "set": dict(replace or {})}


def as_gate(check: Check) -> Check:
    """The same check as a condition: without it the reward is 0."""
    return check | {"gate": True}


def text(rows: Sequence[str]) -> str:
    """Lines as a file."""
    return "".join(f"{row}\n" for row in rows)
