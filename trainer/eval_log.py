"""`evals.jsonl`: one line an evaluation, and what of it goes into the step log and to the trackers.

Written by the evaluator alone, read by trainer, launcher and reports. It only appends, one write a line, so a reader
never sees half an evaluation followed by another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = "evals.jsonl"

TRAINED = "evals/trained"
"""A file of the run: the trainer has made its last step and waits for the last evaluation, to report it."""

OVER = "evals/over"
"""A file of the run: no further evaluation comes."""

EVAL_METRICS: dict[str, str] = {
    "eval/step": "step of a held-out evaluation that has ended; each is in one step's line, in their order",
    "eval/version": "policy version it ran on",
    "eval/solve_rate": "share of its scored attempts that were solved",
    "eval/solve_low": "lower end of the rate's 95 % interval (Wilson)",
    "eval/solve_high": "upper end of it",
    "eval/reward_mean": "mean reward of its scored attempts",
    "eval/versus_base": "solve rate minus the base model's, mean over tasks",
    "eval/versus_base_low": "lower end of that difference's 95 % interval (bootstrap over tasks)",
    "eval/versus_base_high": "upper end of it",
    "eval/versus_start": "solve rate minus that of the policy before the first step, mean over tasks",
    "eval/versus_start_low": "lower end of that difference's 95 % interval",
    "eval/versus_start_high": "upper end of it",
    "eval/tool_calls_per_solved": "tool calls of a solved attempt, mean",
    "eval/turns": "turns of a scored attempt, mean",
    "eval/tokens": "sampled tokens of a scored attempt, mean",
    "eval/truncated_share": "share of answers cut by a token limit",
    "eval/empty_share": "share of answers with neither text nor a tool call",
    "eval/alarms": "alarms after it; their words are in the log and in evals.jsonl",
}


def append(folder: Path, record: Mapping[str, Any]) -> None:
    """Add one evaluation to the run in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def read(folder: Path) -> list[dict[str, Any]]:
    """All evaluations of the run in `folder`, oldest first; a line still being written is left out."""
    path = folder / FILE
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines if line.strip()]


def eval_metrics(record: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of one evaluation under the names of `EVAL_METRICS`; what is not known is left out."""
    low, high = record.get("ci") or (None, None)
    found = {
        "eval/step": record["step"],
        "eval/version": record["version"],
        "eval/solve_rate": record["rate"],
        "eval/solve_low": low,
        "eval/solve_high": high,
        "eval/reward_mean": record["reward_mean"],
        "eval/tool_calls_per_solved": record["tool_calls_per_solved"],
        "eval/turns": record["turns_mean"],
        "eval/tokens": record["tokens_mean"],
        "eval/truncated_share": record["truncated_share"],
        "eval/empty_share": record["empty_share"],
        "eval/alarms": len(record["alarms"]),
    }
    for other in ("base", "start"):
        if versus := record.get(f"versus_{other}"):
            found[f"eval/versus_{other}"] = versus["difference"]
            found[f"eval/versus_{other}_low"], found[f"eval/versus_{other}_high"] = versus["ci"]
    return {name: value for name, value in found.items() if value is not None}


def sentence(record: Mapping[str, Any]) -> str:
    """One evaluation in a line for people."""
    if record["rate"] is None:
        return f"evaluation {record['name']}: nothing could be scored ({record['causes']})"
    low, high = record["ci"]
    text = (
        f"evaluation {record['name']} (version {record['version']}): {record['solved']} of {record['scored']} solved, "
        f"{100 * record['rate']:.1f} % ({100 * low:.1f} to {100 * high:.1f})"
    )
    for other in ("base", "start"):
        if versus := record.get(f"versus_{other}"):
            low, high = versus["ci"]
            text += f"; {100 * versus['difference']:+.1f} over {other} ({100 * low:+.1f} to {100 * high:+.1f})"
    return text
