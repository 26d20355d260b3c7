"""What the viewer reads, as one small protocol, and a reader over values in memory.

The pages know only these few reads, so they show a live gateway's store, a finished run and a test's sample alike.
Nothing here may write: a viewer opened on a running gateway must leave no trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from turngate.proxy.turns import Turn
from turngate.proxy.wire import AdapterInfo, RolloutInfo


class ViewerError(RuntimeError):
    """The viewer cannot show what was asked for; the message says what was wrong and what to do."""


@dataclass(frozen=True, slots=True)
class TurnCount:
    """How many turns of a rollout share a label, kind and cause, and how many tokens they sampled."""

    rollout: str
    label: str
    kind: str
    break_cause: str | None
    turns: int
    completion_tokens: int


class StoreReader(Protocol):
    """The reads the viewer needs. `state` is any value that differs once something was written."""

    @property
    def name(self) -> str:
        """The run's name, as shown in the title."""

    @property
    def tokenizer_file(self) -> Path | None:
        """The run's `tokenizer.json`; None when it was not kept."""

    def state(self) -> Hashable:
        """Cheap to ask; a different value means: read again."""

    def rollouts(self) -> Sequence[RolloutInfo]:
        """All rollouts, in any order."""

    def turn_counts(self) -> Sequence[TurnCount]:
        """Turns of all rollouts, counted without reading a token."""

    def adapters(self) -> Sequence[AdapterInfo]:
        """All adapter versions of all policies, in any order."""

    def turns(self, rollout: str) -> Sequence[Turn]:
        """All turns of one rollout, by `seq`; empty for an unknown rollout."""


@dataclass(frozen=True)
class MemoryReader:
    """A reader over values that are already there: one exported rollout, or a test's sample."""

    name: str
    infos: Sequence[RolloutInfo]
    by_rollout: Mapping[str, Sequence[Turn]]
    published: Sequence[AdapterInfo] = ()
    tokenizer_file: Path | None = None
    version: list[int] = field(default_factory=lambda: [0])

    def state(self) -> Hashable:
        """The counter in `version`, raised by whoever changes the values."""
        return self.version[0]

    def rollouts(self) -> Sequence[RolloutInfo]:
        """All rollouts."""
        return self.infos

    def turn_counts(self) -> Sequence[TurnCount]:
        """Counted from the turns."""
        turns: Counter[tuple[str, str, str, str | None]] = Counter()
        tokens: Counter[tuple[str, str, str, str | None]] = Counter()
        for rollout, some in self.by_rollout.items():
            for turn in some:
                key = (rollout, str(turn.label), str(turn.kind), turn.break_cause)
                turns[key] += 1
                tokens[key] += len(turn.completion_ids)
        return [TurnCount(*key, turns=count, completion_tokens=tokens[key]) for key, count in turns.items()]

    def adapters(self) -> Sequence[AdapterInfo]:
        """All adapter versions."""
        return self.published

    def turns(self, rollout: str) -> Sequence[Turn]:
        """The turns of one rollout."""
        return sorted(self.by_rollout.get(rollout, ()), key=lambda turn: turn.seq)
