"""A whole store, read-only: the control store and every worker's turns as one.

For export, verify and viewers, also while a gateway writes. It cannot write: every connection is opened read-only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Self

from turngate.proxy.store.control import ControlStore
from turngate.proxy.store.layout import StoreFolder
from turngate.proxy.store.records import RolloutFilter, RolloutRecord
from turngate.proxy.store.turnstore import TurnCounts, TurnStore
from turngate.proxy.turns import Turn

_PAGE = 500


class StoreReader:
    """Use as a context manager.

    Raises:
        StoreMissing: there is no store at `path`. SchemaTooNew, StoreDamaged: it cannot be read.
    """

    def __init__(self, path: Path | str) -> None:
        self.folder = StoreFolder.find(path)
        with ExitStack() as stack:
            self.control = stack.enter_context(ControlStore(self.folder.control, readonly=True))
            self.stores = [stack.enter_context(TurnStore(f, readonly=True)) for f in self.folder.all_turns()]
            self._open = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every file."""
        self._open.close()

    def rollouts(self, where: RolloutFilter | None = None) -> Iterator[RolloutRecord]:
        """Every rollout that matches, oldest first, read a page at a time; `where.limit` is not applied."""
        where = replace(where or RolloutFilter(), limit=_PAGE, oldest_first=True)
        while page := self.control.rollouts(where):
            yield from page
            where = replace(where, after=page[-1].id)

    def turns(self, rollout: str) -> list[Turn]:
        """The turns of a rollout by `seq`, from the worker that has them."""
        return next((turns for store in self.stores if (turns := store.turns(rollout))), [])

    def counts(self, rollout: str) -> TurnCounts:
        """Counts of a rollout's turns."""
        found = TurnCounts()
        for store in self.stores:
            found = found.plus(store.counts(rollout))
        return found
