"""Writes the `words` task set beside itself: small text tasks of two messages that a 135M model sometimes solves.

The agent is asked what something is, and then to say it again in so few words; the verifier counts words of the last
answer, nothing else, so the same answer always gets the same reward. Run it again after changing it: a test compares.
"""

from __future__ import annotations

from pathlib import Path

TOPICS: tuple[tuple[str, str, int], ...] = (
    ("sea", "the sea", 12),
    ("moon", "the moon", 10),
    ("bread", "bread", 10),
    ("rain", "rain", 10),
    ("tree", "a tree", 10),
    ("school", "a school", 12),
    ("music", "music", 10),
    ("winter", "winter", 10),
    ("river", "a river", 12),
    ("garden", "a garden", 12),
    ("sleep", "sleep", 10),
    ("horse", "a horse", 10),
    ("book", "a book", 10),
    ("fire", "fire", 10),
    ("city", "a city", 12),
    ("friend", "a friend", 10),
)
"""Folder, what is asked about, most words of the second answer."""

NUMBERS = {10: "ten", 12: "twelve"}

TASK_TOML = """version = "1.0"

[metadata]
category = "text"
tags = ["words"]

[metadata.turngate]
prompts = ["instruction.md", "followup.md"]
reward_range = [0.0, 1.0]

[agent]
timeout_sec = 300.0

[verifier]
timeout_sec = 30.0
"""

TEST_SH = """#!/bin/sh
# Reward: 1 for 1 to {most} words in answer.txt, a tenth less for each word too many, 0 for none.
n=$(wc -w < answer.txt)
awk -v n="$n" -v most={most} 'BEGIN {{
  r = n < 1 ? 0 : n > most ? 1 - (n - most) / 10 : 1
  printf "%.3f\\n", r < 0 ? 0 : r
}}' > "${{TURNGATE_REWARDS:-/logs/verifier}}/reward.txt"
"""

SOLVE_SH = """#!/bin/sh
echo "I would say it is simply that." > answer.txt
"""


def files(topic: str, most: int) -> dict[str, str]:
    """The files of one task: path relative to its folder -> text."""
    return {
        "task.toml": TASK_TOML,
        "instruction.md": f"What is {topic}?\n",
        "followup.md": f"Say it shorter, in {NUMBERS[most]} words or less.\n",
        "tests/test.sh": TEST_SH.format(most=most),
        "solution/solve.sh": SOLVE_SH,
    }


def main(root: Path) -> None:
    """Write all tasks below `root`."""
    for folder, topic, most in TOPICS:
        for name, text in files(topic, most).items():
            path = root / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


if __name__ == "__main__":
    main(Path(__file__).parent)
