"""Writes the `words` task set beside itself: small text tasks of two messages that a 135M model sometimes solves.

The agent is asked what something is, and then to say it again in so few words; the verifier counts words of the last
answer, nothing else, so the same answer always gets the same reward. Run it again after changing it: a test compares.
"""

from __future__ import annotations

from pathlib import Path

TOPICS: tuple[tuple[str, str, int], ...] = (
    ("sea", "the sea", 14),
    ("moon", "the moon", 12),
    ("bread", "bread", 12),
    ("rain", "rain", 12),
    ("tree", "a tree", 12),
    ("school", "a school", 14),
    ("music", "music", 12),
    ("winter", "winter", 12),
    ("river", "a river", 14),
    ("garden", "a garden", 14),
    ("sleep", "sleep", 12),
    ("horse", "a horse", 12),
    ("book", "a book", 12),
    ("fire", "fire", 12),
    ("city", "a city", 14),
    ("friend", "a friend", 12),
)
"""Folder, what is asked about, most words of the second answer."""

LEAST_WORDS = 3

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
# Reward: 1 for {least} to {most} words in answer.txt; less for fewer, and a tenth less for each word too many.
n=$(wc -w < answer.txt)
awk -v n="$n" -v low={least} -v high={most} 'BEGIN {{
  r = n < low ? n / (2 * low) : n > high ? 1 - (n - high) / 10 : 1
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
        "followup.md": f"Say it again in one sentence of {LEAST_WORDS} to {most} words.\n",
        "tests/test.sh": TEST_SH.format(least=LEAST_WORDS, most=most),
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
