"""Two schedules side by side, from their stores, step records and the GPUs' samples: one JSON object.

python bench/gpu/two_report.py RUNS [--gpus gpus.csv] [--cpus cpus.jsonl] [--flips flips.json] [--quick]

Of each schedule the newest run in RUNS counts, from its agents' first turn on and for as long as the shorter of the two
ran, so that both have the same budget of time. A GPU is idle while no kernel runs (nvidia-smi's samples); the engine as
a process is idle while no turn is between its dispatch and its end, the trainer while it waits for groups.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learn_report import all_turns, merged, overlap_ns, step_figures, store_figures

from turngate.proxy.store.reader import StoreReader
from turngate.proxy.turns import Turn
from turngate.trainer.progress import read_metrics

REFERENCE = {"tokens": 3.1, "steps": 2.5}
"""Published ratios of an asynchronous to a synchronous schedule, in tokens and in steps."""
BUCKET_S = 10.0


@dataclass(frozen=True)
class Lap:
    """One schedule's run; times in s of the epoch."""

    folder: Path
    turns: list[Turn]
    steps: list[dict[str, Any]]
    begin_s: float

    @property
    def last_s(self) -> float:
        """When it was told to end, as `two.sh` wrote down; now, where it still runs."""
        told = self.folder / "told_to_end_s"
        return float(told.read_text()) if told.exists() else time.time()


def ended_s(turn: Turn) -> float:
    """When a turn's last token came."""
    return (turn.timings.received_at_ns + turn.timings.done_ns - turn.timings.received_ns) / 1e9


def dispatched_s(turn: Turn) -> float:
    """When the engine was asked."""
    return (turn.timings.received_at_ns + turn.timings.dispatched_ns - turn.timings.received_ns) / 1e9


def load(folder: Path) -> Lap | None:
    """A run, if its agents have had an answer."""
    turns = list(all_turns(folder))
    if not turns:
        return None
    begin_s = min(turn.timings.received_at_ns for turn in turns) / 1e9
    return Lap(folder, turns, read_metrics(folder / "metrics.jsonl"), begin_s)


def gpu_idle(samples: Path | None, begin_s: float, end_s: float) -> dict[str, float]:
    """For each GPU the mean share of time without a kernel."""
    found: dict[str, list[float]] = {}
    if samples is None or not samples.exists():
        return {}
    for line in samples.read_text(errors="replace").splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) != 4:
            continue
        try:
            at_s = datetime.datetime.strptime(words[0], "%Y/%m/%d %H:%M:%S.%f").timestamp()
            busy = float(words[2]) / 100
        except ValueError:
            continue
        if begin_s <= at_s <= end_s:
            found.setdefault(words[1], []).append(1 - busy)
    return {gpu: round(statistics.fmean(values), 4) for gpu, values in sorted(found.items())}


def mean_cores(samples: Path | None, begin_s: float, end_s: float) -> dict[str, float]:
    """Cores that each part took, as `cpus.py` saw it; `all` are those of all processes, `cores` the machine's."""
    if samples is None or not samples.exists():
        return {}
    lines = [json.loads(line) for line in samples.read_text().splitlines() if line.endswith("}")]
    lines = [line for line in lines if begin_s <= line["at"] <= end_s]
    if not lines:
        return {}
    parts = sorted({part for line in lines for part in line["by"]})
    means = {part: statistics.fmean(line["by"].get(part, 0.0) for line in lines) for part in parts}
    means["all"] = statistics.fmean(line["busy"] for line in lines)
    return {part: round(cores, 2) for part, cores in means.items()} | {"cores": lines[0]["cores"]}


def rewards(folder: Path, begin_s: float, end_s: float) -> list[dict[str, float]]:
    """Mean reward of the rollouts that ended in each span of `BUCKET_S`."""
    spans: dict[int, list[float]] = {}
    with StoreReader(folder) as store:
        for record in store.rollouts():
            at_s = (record.finished_at_ns or 0) / 1e9
            if record.reward is not None and begin_s <= at_s <= end_s:
                spans.setdefault(int((at_s - begin_s) / BUCKET_S), []).append(record.reward)
    return [
        {"until_s": (at + 1) * BUCKET_S, "rollouts": len(values), "reward": round(statistics.fmean(values), 4)}
        for at, values in sorted(spans.items())
    ]


def figures(lap: Lap, window_s: float, gpus: Path | None, cpus: Path | None, quick: bool) -> dict[str, Any]:
    """Of one schedule within the window."""
    end_s = lap.begin_s + window_s
    turns = [turn for turn in lap.turns if ended_s(turn) <= end_s]
    steps = [step for step in lap.steps if step["time"] <= end_s]
    busy = merged([(dispatched_s(turn), min(ended_s(turn), end_s)) for turn in lap.turns if dispatched_s(turn) < end_s])
    waits_s = sum(min(step["wait_s"], step["time"] - lap.begin_s) for step in steps)
    trains_s = sum(step["train_s"] for step in steps)
    generated = sum(len(turn.completion_ids) for turn in turns)
    rewarded = rewards(lap.folder, lap.begin_s, end_s)
    found: dict[str, Any] = {
        "run": lap.folder.name,
        "window_s": round(window_s, 1),
        "rewarded_rollouts": sum(int(span["rollouts"]) for span in rewarded),
        "turns": len(turns),
        "generated_tokens": generated,
        "generated_tokens_per_s": round(generated / window_s, 1),
        "prompt_tokens": sum(turn.prompt_tokens for turn in turns),
        "steps": len(steps),
        "trained_tokens": sum(step["tokens"] for step in steps),
        "trained_groups": sum(step["groups"] for step in steps),
        "gpu_idle": gpu_idle(gpus, lap.begin_s, end_s),
        "cores": mean_cores(cpus, lap.begin_s, end_s),
        "engine_without_a_turn_share": round(1 - overlap_ns(lap.begin_s, end_s, busy) / window_s, 4),
        "mean_turns_at_once": round(sum(ended_s(turn) - dispatched_s(turn) for turn in turns) / window_s, 2),
        "trainer_training_share": round(trains_s / window_s, 4),
        "trainer_waiting_share": round(waits_s / window_s, 4),
        "reward_by_step": [
            {"at_s": round(step["time"] - lap.begin_s, 1), "reward": round(step["reward_mean"], 4)} for step in steps
        ],
        "reward_over_time": rewarded,
    }
    if steps:
        kept = ("step_s_p50", "train_s_p50", "publish_s_p50", "staleness_mean", "staleness_max", "stale_tokens")
        every = step_figures(steps)
        found |= {name: every[name] for name in (*kept, "zero_variance_groups", "ratio_mean", "kl_by_step")}
    if not quick:
        found |= store_figures(lap.folder)
    return found


def ratios(found: dict[str, Any]) -> dict[str, Any]:
    """Asynchronous over synchronous, beside the published ones."""
    first, second = found.get("async"), found.get("sync")
    if not first or not second:
        return {}

    def of(name: str) -> float | None:
        return round(first[name] / second[name], 3) if second[name] else None

    return {
        "ratio_rewarded_rollouts": of("rewarded_rollouts"),
        "ratio_generated_tokens": of("generated_tokens"),
        "ratio_trained_tokens": of("trained_tokens"),
        "ratio_steps": of("steps"),
        "reference_tokens": REFERENCE["tokens"],
        "reference_steps": REFERENCE["steps"],
    }


def newest(runs: Path, schedule: str) -> Path | None:
    """The schedule's newest run that has a store."""
    found: Sequence[Path] = sorted(path for path in runs.glob(f"{schedule}-*") if (path / "store").is_dir())
    return found[-1] if found else None


def main() -> int:
    """Print the object."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path)
    parser.add_argument("--gpus", type=Path)
    parser.add_argument("--cpus", type=Path)
    parser.add_argument("--flips", type=Path)
    parser.add_argument("--quick", action="store_true", help="without the check of the stores")
    args = parser.parse_args()
    folders = {schedule: newest(args.runs, schedule) for schedule in ("async", "sync")}
    laps = {schedule: load(folder) for schedule, folder in folders.items() if folder is not None}
    there = {schedule: lap for schedule, lap in laps.items() if lap is not None}
    found: dict[str, Any] = {"complete": not args.quick and len(there) == 2}
    if there:
        window_s = min(lap.last_s - lap.begin_s for lap in there.values())
        if len(there) == 1 or window_s > 0:
            found |= {name: figures(lap, window_s, args.gpus, args.cpus, args.quick) for name, lap in there.items()}
    found |= ratios(found)
    if args.flips and args.flips.exists():
        found["flips"] = json.loads(args.flips.read_text())
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
