"""docs/harnesses.md says what the code does."""

from __future__ import annotations

from pathlib import Path

from turngate.harnesses.registry import list_harnesses
from turngate.harnesses.rollout import CAUSES
from turngate.harnesses.spawn import DOOR_PORT

PAGE = (Path(__file__).parents[2] / "docs" / "harnesses.md").read_text()


def test_every_cause_is_documented_with_the_words_of_the_code() -> None:
    for cause, meaning in CAUSES.items():
        assert f"| `{cause}` | {meaning} |" in PAGE


def test_every_agent_is_documented_at_its_pinned_version() -> None:
    for harness in list_harnesses():
        assert f"| `{harness.name}` | `{harness.package}` | {harness.version} | {harness.dialect} |" in PAGE


def test_the_door_is_where_the_page_says() -> None:
    assert f"127.0.0.1:{DOOR_PORT}" in PAGE
