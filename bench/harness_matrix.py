#!/usr/bin/env python3
"""Every agent in its sandbox, through a gateway, on scripted scenarios: what must come of each is written down first.

    python bench/harness_matrix.py                                      # all of it
    python bench/harness_matrix.py --harness pi --scenario odd-json     # some of it; both may be given several times
    python bench/harness_matrix.py --out bench/results/harness_matrix.jsonl --jobs 2
    python bench/harness_matrix.py --out bench/results/harness_matrix.jsonl --go-on     # what is left or went wrong

One JSON line a run, then one on all labels: their precision and recall, those of the scenarios on which the rules were
not developed apart. What is not as bench/matrix/expected.toml says goes to standard error, and the exit status is 1.
`exact_rows` are rows handed to training that equal those rebuilt from the raw bodies between gateway and engine.
`duplicate_turns` are turns with the very prompt of another, beyond those that the agent truly asks twice.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.matrix.expectations import load_expected
from bench.matrix.play import play
from bench.matrix.scenarios import SCENARIOS
from bench.matrix.scoring import summary
from bench.matrix.verdict import Heard, Run
from bench.matrix.vocabulary import WORDS
from tests.conftest import find_model

MODEL = "qwen-coder-0.5b"


def chosen(args: argparse.Namespace) -> list[tuple[str, str, Path | None]]:
    """The runs that were asked for: agent, scenario, where to leave them."""
    return [
        (name, title, args.keep)
        for title, of_agent in load_expected().items()
        for name in of_agent
        if name in (args.harness or WORDS) and title in (args.scenario or SCENARIOS)
    ]


def run_one(name: str, title: str, keep: Path | None) -> Run:
    """One run, in a process of its own pool."""
    scenario, expected = SCENARIOS[title](name, WORDS[name]), load_expected()[title][name]
    with tempfile.TemporaryDirectory(prefix=f"matrix-{name}-") as folder:
        place = keep / f"{name}-{title}" if keep else Path(folder)
        return asyncio.run(play(name, title, scenario, expected, find_model(MODEL), place))


def run_all(args: argparse.Namespace, kept: list[Run]) -> list[Run]:
    """`kept`, and the others that were asked for; each line is printed and written as soon as it is there."""
    done = {(run.line["harness"], run.line["scenario"]): run for run in kept}
    order = chosen(args)
    left = [one for one in order if one[:2] not in done]
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        for found in as_completed([pool.submit(run_one, *one) for one in left]):
            run = found.result()
            print(json.dumps(run.line), flush=True)
            for words in run.wrong:
                print(f"  {run.line['harness']} {run.line['scenario']}: {words}", file=sys.stderr, flush=True)
            done[run.line["harness"], run.line["scenario"]] = run
            if args.out:
                write(args.out, [done[one[:2]] for one in order if one[:2] in done])
    return [done[one[:2]] for one in order]


def write(out: Path, runs: list[Run]) -> None:
    """The lines of the runs so far, and what they come to."""
    out.write_text("".join(json.dumps(one) + "\n" for one in [*(run.line for run in runs), summary(runs)]))


def kept_runs(out: Path | None) -> list[Run]:
    """Runs of an earlier call that were as expected: then each of their labels was true."""
    runs = []
    for line in map(json.loads, out.read_text().splitlines() if out is not None and out.exists() else ()):
        if line.get("harness") and line["ok"]:
            heard = tuple(Heard(label, "kept", label) for label, count in line["labels"].items() for _ in range(count))
            expected = load_expected().get(line["scenario"], {}).get(line["harness"])
            if expected is not None:
                runs.append(Run(line, heard, (), expected.held_out))
    return runs


def main() -> int:
    """Run, print, and say by the exit status whether all is as expected."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--harness", action="append", default=[], choices=sorted(WORDS), help="only this agent")
    parser.add_argument("--scenario", action="append", default=[], choices=sorted(SCENARIOS), help="only this one")
    parser.add_argument("--out", type=Path, help="a file for the lines too")
    parser.add_argument("--go-on", action="store_true", help="runs that are as expected in --out are not run again")
    parser.add_argument("--keep", type=Path, help="a new folder in which store and logs of each run are left")
    parser.add_argument("--jobs", type=int, default=1, help="how many runs at once")
    args = parser.parse_args()
    if not chosen(args):
        parser.error("no such agent has a part in such a scenario")
    runs = run_all(args, kept_runs(args.out) if args.go_on else [])
    print(json.dumps(summary(runs)))
    if args.out:
        write(args.out, runs)
    return 0 if all(run.line["ok"] for run in runs) else 1


if __name__ == "__main__":
    raise SystemExit(main())
