"""What a learning run amounts to, from its store, its step records and its evaluations: one JSON object.

python bench/gpu/learn_report.py runs/ID [--quick] [--sandbox bubblewrap] [--engine URL]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from turngate.proxy.store.reader import StoreReader
from turngate.proxy.turns import Turn
from turngate.proxy.verify import verify_store
from turngate.trainer import eval_log
from turngate.trainer.eval_stats import paired_difference
from turngate.trainer.progress import read_metrics

DRAWS = 10_000
SOLVED_AT = 1.0


def evaluation_figures(evals: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Solve rates of base, start and the newest version, each half apart, and their paired differences."""
    found: dict[str, Any] = {}
    named = {one["name"]: one for one in evals}
    last = next((one for one in reversed(evals) if one["step"] > 0), None)
    chosen = {"base": named.get("base"), "before": named.get("start"), "after": last}
    for name, one in chosen.items():
        found[f"solve_{name}"] = one and one["rate"]
        found[f"solve_{name}_ci"] = one and one["ci"]
        found[f"solve_{name}_by_set"] = one and one["by_set"]
        found[f"reward_{name}"] = one and one["reward_mean"]
        found[f"version_{name}"] = one and one["version"]
        found[f"attempts_{name}"] = one and one["attempts"]
        found[f"tool_calls_per_solved_{name}"] = one and one["tool_calls_per_solved"]
    for earlier, later in (("before", "after"), ("base", "before"), ("base", "after")):
        first, second = chosen[earlier], chosen[later]
        found[f"{later}_minus_{earlier}"] = None
        if first and second:
            gap = paired_difference(first["rewards"], second["rewards"], solved_at=SOLVED_AT, draws=DRAWS)
            found[f"{later}_minus_{earlier}"] = gap and gap.as_json()
    kept = ("name", "step", "version", "rate", "ci", "reward_mean", "turns_mean", "tokens_mean", "truncated_share")
    found["evaluations"] = [
        {name: one[name] for name in (*kept, "empty_share", "seconds", "causes", "alarms")} for one in evals
    ]
    return found


def step_figures(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of the trainer's steps; a step made again after a resume counts as it was made last."""
    steps = [one for _, one in sorted({one["step"]: one for one in steps}.items())]
    if not steps:
        return {"steps": 0}
    known = {name: [one[name] for one in steps if one.get(name) is not None] for name in steps[0] | steps[-1]}
    ratios = [one["exact/ratio_mean"] for one in steps if one.get("exact/ratio_mean") is not None]
    stepping_s = sum(known.get("step_s", []))
    return {
        "steps": len(steps),
        "step_s_p50": statistics.median(known["step_s"]),
        "train_s_p50": statistics.median(known["train_s"]),
        "publish_s_p50": statistics.median(known.get("publish_s") or [0.0]),
        "trained_tokens": sum(known["tokens"]),
        "trained_tokens_per_s": sum(known["tokens"]) / stepping_s if stepping_s else None,
        "trainer_wait_share": sum(known["wait_s"]) / stepping_s if stepping_s else None,
        "staleness_mean": statistics.fmean(known["staleness_mean"]),
        "staleness_max": max(known["staleness_max"]),
        "stale_tokens": sum(known["stale_tokens"]),
        "zero_variance_groups": sum(known["zero_variance"]),
        "ratio_mean": statistics.fmean(ratios) if ratios else None,
        "ratio_mean_by_step": [round(one, 5) for one in ratios],
        "reward_mean_by_step": [round(one, 4) for one in known["reward_mean"]],
        "entropy_by_step": [round(one, 4) for one in known["entropy"]],
        "kl_by_step": [round(one, 6) for one in known["kl"]],
        "clip_fraction_mean": statistics.fmean(known["clip_fraction"]),
        "truncated_fraction_mean": statistics.fmean(known["truncated_fraction"]),
    }


def all_turns(run: Path) -> Iterator[Turn]:
    """Every turn that the policy itself answered."""
    with StoreReader(run) as store:
        for record in store.rollouts():
            if record.new.upstream is None:
                yield from store.turns(record.id)


def turn_figures(run: Path, steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the engine did during the steps: from each one's beginning to its end, not in the pause of a resume.

    The engine is idle while no turn is between its dispatch and its end.
    """
    windows = sorted((one["time"] * 1e9 - (one.get("step_s") or 0.0) * 1e9, one["time"] * 1e9) for one in steps)
    span_s = sum(end - begin for begin, end in windows) / 1e9
    if not span_s:
        return {}
    tokens, busy = 0, list[tuple[float, float]]()
    for turn in all_turns(run):
        t = turn.timings
        stop = t.received_at_ns + (t.done_ns - t.received_ns)
        busy.append((t.received_at_ns + (t.dispatched_ns - t.received_ns), stop))
        if any(begin < stop <= end for begin, end in windows):
            tokens += len(turn.completion_ids)
    together = merged(busy)
    busy_s = sum(overlap_ns(begin, end, together) for begin, end in windows) / 1e9
    return {
        "rl_span_s": span_s,
        "generated_tokens": tokens,
        "generated_tokens_per_s": tokens / span_s,
        "engine_idle_share": 1 - busy_s / span_s,
    }


def merged(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same time in spans that do not overlap."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def overlap_ns(begin: float, end: float, spans: Sequence[tuple[float, float]]) -> float:
    """How much of `begin` to `end` lies in spans that do not overlap."""
    return sum(max(0.0, min(end, stop) - max(begin, start)) for start, stop in spans)


def store_figures(run: Path) -> dict[str, Any]:
    """What `turngate verify` proves."""
    report = verify_store(run)
    return {
        "turns": report.turns,
        "spliced": report.spliced,
        "breaks": dict(report.breaks),
        "rows": report.rows,
        "exact_rows": report.exact_rows,
        "problems": len(report.problems),
    }


def main() -> int:
    """Print the object."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--quick", action="store_true", help="without what needs the store's turns")
    parser.add_argument("--sandbox", default="")
    parser.add_argument("--engine", help="URL of the vLLM server, for its version")
    args = parser.parse_args()
    steps = read_metrics(args.run / "metrics.jsonl")
    figures: dict[str, Any] = {"run": args.run.name, "sandbox": args.sandbox, "complete": not args.quick}
    if args.engine:
        with urllib.request.urlopen(f"{args.engine}/version", timeout=10) as answer:
            figures["vllm"] = json.load(answer)["version"]
    sft = args.run / "warm_start" / "sft.json"
    figures["sft"] = json.loads(sft.read_text()) if sft.exists() else None
    figures |= evaluation_figures(eval_log.read(args.run)) | step_figures(steps)
    if not args.quick:
        import torch

        figures["gpu"] = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
        figures["torch"] = torch.__version__
        figures |= turn_figures(args.run, steps) | store_figures(args.run)
    print(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
