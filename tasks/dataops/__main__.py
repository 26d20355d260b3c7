"""`python -m turngate.tasks.dataops OUT [--split …] [--seed N]`: write the set, or one split of it."""

from __future__ import annotations

import argparse
from pathlib import Path

from turngate.tasks.dataops.generate import SPLITS, write_set


def main() -> int:
    """Write and say how many."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m turngate.tasks.dataops", description="Write the dataops task set."
    )
    parser.add_argument("out", type=Path, help="folder for the task directories")
    parser.add_argument("--split", choices=("all", *SPLITS), default="all")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other parameters (default: 0)")
    options = parser.parse_args()
    print(f"{write_set(options.out, options.split, options.seed)} tasks in {options.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
