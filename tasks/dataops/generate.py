"""Writes the set as Harbor task directories: which tasks there are, their files, the three splits.

Byte for byte the same for a seed. Numbers 1 to 10 of a trained template are for training, 11 is held out; templates
marked `held_out` are never trained. The numbers of one split never appear in another.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

from turngate.tasks.dataops.registry import TEMPLATES
from turngate.tasks.dataops.template import Draft, Template
from turngate.tasks.steps import dump_steps, solve_script

SPLITS = ("train", "heldout-parameters", "heldout-templates")
TRAINED_NUMBERS = range(1, 11)
HELD_OUT_NUMBERS = range(11, 12)
HELD_OUT_TEMPLATE_NUMBERS = range(1, 6)
CODE = Path(__file__).parent

TASK_TOML = """version = "1.0"

[metadata]
author_name = "Turngate"
category = "dataops"
difficulty = "{difficulty}"
tags = ["dataops", "level-{level}", "{template}", "{split}"]

[metadata.turngate]
reward_range = [0.0, 1.0]
answer_file = "final_message.txt"

[agent]
timeout_sec = 300.0

[verifier]
timeout_sec = 120.0

[environment]
workdir = "/workspace"
"""
DIFFICULTY = {1: "trivial", 2: "easy", 3: "medium", 4: "hard"}

DOCKERFILE = """FROM python:3.11-slim
WORKDIR /workspace
COPY . /workspace/
"""
DOCKERIGNORE = "Dockerfile\n.dockerignore\n"

TEST_SH = """#!/bin/sh
# Reads the workspace, writes a number from 0 to 1; checks.json says what is wanted.
cd "${TURNGATE_WORKSPACE:-/workspace}" && exec python3 -I -S "${TURNGATE_TESTS:-/tests}/check.py"
"""


def names(split: str) -> Iterator[tuple[Template, int]]:
    """Templates and numbers of one split."""
    for template in TEMPLATES:
        if template.held_out:
            numbers = HELD_OUT_TEMPLATE_NUMBERS if split == "heldout-templates" else range(0)
        else:
            numbers = {"train": TRAINED_NUMBERS, "heldout-parameters": HELD_OUT_NUMBERS}.get(split, range(0))
        for number in numbers:
            yield template, number


def draft(template: Template, number: int, seed: int = 0) -> Draft:
    """Task `number` of a template."""
    return template.make(Random(f"dataops/{seed}/{template.name}/{number}"), number)


def task_files(template: Template, number: int, split: str, seed: int = 0) -> dict[str, str]:
    """All files of one task directory, by relative path."""
    made = draft(template, number, seed)
    checks = list(made.checks)
    found = {
        "task.toml": TASK_TOML.format(
            difficulty=DIFFICULTY[template.level], level=template.level, template=template.name, split=split
        ),
        "instruction.md": made.instruction + "\n",
        "environment/Dockerfile": DOCKERFILE,
        "environment/.dockerignore": DOCKERIGNORE,
        "tests/test.sh": TEST_SH,
        "tests/check.py": (CODE / "check.py").read_text(encoding="utf-8"),
        "tests/checks.json": json.dumps(checks, indent=1, ensure_ascii=False) + "\n",
        "solution/solve.sh": solve_script(made.steps),
        "solution/steps.json": dump_steps(made.steps),
    }
    if any(check["kind"] in ("calls", "prints") for check in checks):
        found["tests/call.py"] = (CODE / "call.py").read_text(encoding="utf-8")
    return found | {f"environment/{name}": text for name, text in made.files.items()}


def write_set(out: Path, split: str = "all", seed: int = 0) -> int:
    """Write a split, or all of them, as folders below `out`; how many tasks.

    Raises:
        ValueError: no such split.
    """
    if split != "all" and split not in SPLITS:
        raise ValueError(f"no split {split!r}; there are all, {', '.join(SPLITS)}")
    written = 0
    for one in SPLITS if split == "all" else (split,):
        for template, number in names(one):
            for name, text in task_files(template, number, one, seed).items():
                path = out / f"{template.name}-{number:02d}" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            written += 1
    return written
