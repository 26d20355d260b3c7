#!/usr/bin/env python3
"""Every agent in its sandbox, through a gateway, on scripted scenarios: what must come of each is written down first.

    python bench/harness_matrix.py                                      # all of it
    python bench/harness_matrix.py --harness pi --scenario odd-json     # some of it; both may be given several times
    python bench/harness_matrix.py --out bench/results/harness_matrix.jsonl

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
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.matrix.expectations import Expected, load_expected
from bench.matrix.play import Run, play
from bench.matrix.scenarios import SCENARIOS, Scenario
from bench.matrix.scoring import summary
from bench.matrix.vocabulary import WORDS
from tests.conftest import find_model

MODEL = "qwen-coder-0.5b"


def chosen(harnesses: list[str], scenarios: list[str]) -> Iterator[tuple[str, str, Scenario, Expected]]:
    """The runs that were asked for: agent, scenario's name, scenario, what is expected."""
    for title, of_agent in load_expected().items():
        for name, expected in of_agent.items():
            if (not harnesses or name in harnesses) and (not scenarios or title in scenarios):
                yield name, title, SCENARIOS[title](name, WORDS[name]), expected


async def run_all(args: argparse.Namespace) -> list[Run]:
    """One after another, each line printed as soon as it is there."""
    model, runs = find_model(MODEL), []
    for name, title, scenario, expected in chosen(args.harness, args.scenario):
        with tempfile.TemporaryDirectory(prefix=f"matrix-{name}-") as folder:
            place = args.keep / f"{name}-{title}" if args.keep else Path(folder)
            run = await play(name, title, scenario, expected, model, place)
        print(json.dumps(run.line), flush=True)
        for words in run.wrong:
            print(f"  {name} {title}: {words}", file=sys.stderr, flush=True)
        runs.append(run)
    return runs


def main() -> int:
    """Run, print, and say by the exit status whether all is as expected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--harness", action="append", default=[], choices=sorted(WORDS), help="only this agent")
    parser.add_argument("--scenario", action="append", default=[], choices=sorted(SCENARIOS), help="only this one")
    parser.add_argument("--out", type=Path, help="a file for the lines too")
    parser.add_argument("--keep", type=Path, help="a new folder in which store and logs of each run are left")
    args = parser.parse_args()
    runs = asyncio.run(run_all(args))
    last = summary(runs)
    print(json.dumps(last))
    if args.out:
        args.out.write_text("".join(json.dumps(one) + "\n" for one in [*(run.line for run in runs), last]))
    return 0 if all(run.line["ok"] for run in runs) and runs else 1


if __name__ == "__main__":
    raise SystemExit(main())
