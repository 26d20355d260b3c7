"""expected.toml as values: what must come of each scenario with each agent.

Written by people before a run; nothing here may fill in what a run would need to pass.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from turngate.proxy.turns import Label

FILE = Path(__file__).resolve().parent / "expected.toml"


class Expected(BaseModel):
    """One run; the words are explained at the head of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    labels: dict[Label, int]
    rows: int
    breaks: dict[str, int] = Field(default_factory=dict)
    status: str = "scored"
    again: int = 0
    held_out: bool = False

    @property
    def turns(self) -> int:
        """Turns in all."""
        return sum(self.labels.values())


def load_expected(path: Path = FILE) -> dict[str, dict[str, Expected]]:
    """By scenario, then by agent.

    Raises:
        pydantic.ValidationError: the file says something that has no meaning.
    """
    return TypeAdapter(dict[str, dict[str, Expected]]).validate_python(tomllib.loads(path.read_text()))
