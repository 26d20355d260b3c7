"""The figures of a run on a GPU, from its store and the trainer's step records alone: one JSON object.

python bench/gpu/report.py runs/ID --overhead overhead.json --vllm 0.26.0 --sandbox bubblewrap
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from turngate.proxy.store.reader import StoreReader
from turngate.proxy.turns import Turn
from turngate.proxy.verify import verify_store


def all_turns(run: Path) -> list[Turn]:
    """Every turn of the run."""
    with StoreReader(run) as store:
        return [turn for record in store.rollouts() for turn in store.turns(record.id)]


def percentile(values: list[float], share: float) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def turn_figures(turns: list[Turn]) -> dict[str, Any]:
    """Rates over the time in which turns ran, and what the gateway did before each was dispatched."""
    begun = min(turn.timings.received_ns for turn in turns)
    ended = max(turn.timings.done_ns for turn in turns)
    span_s = (ended - begun) / 1e9
    before_ms = [(turn.timings.dispatched_ns - turn.timings.received_ns) / 1e6 for turn in turns]
    first_ms = [(turn.timings.first_token_ns - turn.timings.dispatched_ns) / 1e6 for turn in turns]
    by_version: dict[str, int] = {}
    for turn in turns:
        for span in turn.spans:
            by_version[str(span.version)] = by_version.get(str(span.version), 0) + span.end - span.start
    return {
        "span_s": round(span_s, 1),
        "turns_per_s": round(len(turns) / span_s, 2),
        "generated_tokens_per_s": round(sum(len(turn.completion_ids) for turn in turns) / span_s, 1),
        "prompt_tokens": sum(turn.prompt_tokens for turn in turns),
        "rendered_tokens": sum(len(turn.tail_ids) for turn in turns),
        "before_dispatch_p50_ms": round(statistics.median(before_ms), 2),
        "before_dispatch_p99_ms": round(percentile(before_ms, 0.99), 2),
        "first_token_p50_ms": round(statistics.median(first_ms), 2),
        "tokens_by_version": by_version,
        "turns_with_tool_calls": sum(bool(turn.response.get("tool_calls")) for turn in turns),
    }


def step_figures(path: Path) -> dict[str, Any]:
    """Of the trainer's steps."""
    steps = [json.loads(line) for line in path.read_text().splitlines()]
    exact = [step for step in steps if step.get("exact/ratio_mean") is not None]
    return {
        "steps": len(steps),
        "step_s_p50": round(statistics.median(step["step_s"] for step in steps if step.get("step_s")), 2),
        "train_s_p50": round(statistics.median(step["train_s"] for step in steps), 2),
        "publish_s_p50": round(statistics.median(step["publish_s"] for step in steps if step.get("publish_s")), 3),
        "trained_tokens": sum(step["tokens"] for step in steps),
        "staleness_mean": round(statistics.mean(step["staleness_mean"] for step in steps), 3),
        "ratio_mean": {str(step["exact/version"]): round(step["exact/ratio_mean"], 5) for step in exact},
        "max_abs_dlogp": {str(step["exact/version"]): round(step["exact/max_abs_dlogp"], 5) for step in exact},
        "canary_engine_max_abs_dlogp": [step.get("canary/engine_max_abs_dlogp") for step in steps],
        "reward_mean": [round(step["reward_mean"], 4) for step in steps],
    }


def main() -> int:
    """Print the object; status 1 when the store does not verify."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--overhead", type=Path, help="output of bench/bench_overhead.py")
    parser.add_argument("--vllm", default="")
    parser.add_argument("--sandbox", default="")
    args = parser.parse_args()
    import torch

    report, turns = verify_store(args.run), all_turns(args.run)
    figures: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none",
        "vllm": args.vllm,
        "torch": torch.__version__,
        "sandbox": args.sandbox,
        "turns": report.turns,
        "spliced": report.spliced,
        "breaks": dict(report.breaks),
        "rows": report.rows,
        "exact_rows": report.exact_rows,
        "problems": len(report.problems),
        **turn_figures(turns),
        **step_figures(args.run / "metrics.jsonl"),
    }
    if args.overhead and args.overhead.exists() and args.overhead.read_text().strip():
        figures["overhead"] = json.loads(args.overhead.read_text().splitlines()[-1])
    print(json.dumps(figures, indent=1))
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
