"""How good the labels are: precision and recall of each over all turns of the matrix.

Scenarios that the rules were developed on say little, so those held out are counted apart.
"""

from __future__ import annotations

import typing
from collections.abc import Sequence
from typing import Any

from bench.matrix.verdict import Heard, Run
from turngate.proxy.turns import Label

LABELS: tuple[str, ...] = typing.get_args(Label)


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """The last line of the matrix."""
    developed = [heard for run in runs if not run.held_out for heard in run.heard]
    held_out = [heard for run in runs if run.held_out for heard in run.heard]
    return {
        "runs": len(runs),
        "ok": sum(run.line["ok"] for run in runs),
        "rows": sum(run.line["rows"] for run in runs),
        "exact_rows": sum(run.line["exact_rows"] for run in runs),
        "duplicate_turns": sum(run.line["duplicate_turns"] for run in runs),
        "labels_developed_on": by_label(developed),
        "labels_held_out": by_label(held_out),
        "held_out": sorted(f"{run.line['harness']} {run.line['scenario']}" for run in runs if run.held_out),
    }


def by_label(heard: Sequence[Heard]) -> dict[str, dict[str, Any]]:
    """`{label: {turns, precision, recall}}`; `turns` truly have the label, a share of nothing is None."""
    found = {}
    for label in LABELS:
        true = sum(one.truth == label for one in heard)
        called = sum(one.label == label for one in heard)
        both = sum(one.label == one.truth == label for one in heard)
        found[label] = {"turns": true, "precision": _share(both, called), "recall": _share(both, true)}
    return found


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None
