"""Which task comes next, and which attempts its group still needs: pure bookkeeping, no clock, no I/O.

A group is `size` attempts at one task. An unscorable attempt is not replaced: the gateway closes a group once so many
attempts have ended, and scores it from the survivors.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from turngate.tasks.harbor import Task


@dataclass(frozen=True, slots=True)
class Slot:
    """One attempt to be made: number `index` of its group."""

    task: Task
    group: str
    index: int


class Plan:
    """Hands out slots, whole groups one after another, each task once an epoch in a seeded order."""

    def __init__(
        self,
        tasks: Sequence[Task],
        *,
        group_size: int,
        groups: int | None,
        epochs: int | None,
        seed: int,
        name_group: Callable[[Task], str],
    ) -> None:
        self._order = _epochs(tasks, epochs, seed)
        self._group_size = group_size
        self._groups_left = groups
        self._name_group = name_group
        self._pending: deque[Slot] = deque()
        self._closed = False

    @property
    def has_pending(self) -> bool:
        """Whether a group that has begun still needs attempts."""
        return bool(self._pending)

    def next_pending(self) -> Slot:
        """The next attempt of a group that has begun."""
        return self._pending.popleft()

    def begin_group(self) -> bool:
        """Begin the next group; False when there is none."""
        if self._closed or self._groups_left == 0:
            return False
        task = next(self._order, None)
        if task is None:
            self._closed = True
            return False
        if self._groups_left is not None:
            self._groups_left -= 1
        group = self._name_group(task)
        self._pending.extend(Slot(task, group, index) for index in range(self._group_size))
        return True

    def close(self) -> None:
        """Begin no further group; the ones that have begun are completed."""
        self._closed = True

    def drop(self) -> None:
        """Hand out nothing any more."""
        self._closed = True
        self._pending.clear()


def _epochs(tasks: Sequence[Task], epochs: int | None, seed: int) -> Iterator[Task]:
    """Every task once an epoch; the order differs between epochs and depends on the seed alone."""
    epoch = 0
    while epochs is None or epoch < epochs:
        order = list(tasks)
        random.Random(f"{seed}:{epoch}").shuffle(order)
        yield from order
        epoch += 1
