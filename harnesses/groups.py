"""Which task comes next, and which attempts its group still needs: pure bookkeeping, no clock, no I/O.

A group wants `size` scored attempts and makes at most `attempts`; an unscorable attempt is not replaced by another, the
gateway scores the group from the survivors. Tasks share the runner fairly: see `Plan.begin_group`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from turngate.tasks.harbor import Task

LEAD = 2
"""How many groups a task may have begun more than the one with the fewest, while slow ones are still running."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One attempt to be made: number `index` of its group."""

    task: Task
    group: str
    index: int


@dataclass(slots=True)
class Group:
    """A group that has begun. `pending` are attempts not started, `flying` those running now."""

    task: Task
    name: str
    size: int
    attempts: int
    pending: list[int]
    flying: set[int] = field(default_factory=set)
    scored: int = 0

    @property
    def ended(self) -> bool:
        """Whether nothing of it is left to do."""
        return not self.pending and not self.flying


class Plan:
    """Hands out slots, whole groups one after another."""

    def __init__(
        self,
        tasks: Sequence[Task],
        *,
        group_size: int,
        groups: int | None,
        epochs: int | None,
        seed: int,
        name_group: Callable[[Task], str],
        extra: int = 0,
    ) -> None:
        self._tasks = list(tasks)
        self._group_size = group_size
        self._attempts = group_size + extra
        self._groups_left = groups
        self._epochs = epochs
        self._seed = seed
        self._name_group = name_group
        self._places: dict[int, dict[str, int]] = {}
        self._begun: Counter[str] = Counter()
        self._active: dict[str, Group] = {}
        self._closed = False

    @property
    def tasks(self) -> list[Task]:
        """All tasks."""
        return list(self._tasks)

    @property
    def closed(self) -> bool:
        """Whether no further group will begin."""
        return self._closed

    @property
    def has_pending(self) -> bool:
        """Whether a group that has begun still needs attempts."""
        return any(group.pending for group in self._active.values())

    def next_pending(self) -> Slot:
        """The next attempt of a group that has begun: of the task with the fewest attempts running."""
        flying: Counter[str] = Counter()
        for group in self._active.values():
            flying[group.task.name] += len(group.flying)
        waiting = [group for group in self._active.values() if group.pending]
        chosen = min(waiting, key=lambda group: flying[group.task.name])
        index = chosen.pending.pop(0)
        chosen.flying.add(index)
        return Slot(chosen.task, chosen.name, index)

    def begin_group(self) -> Group | None:
        """Begin the next group; None when there is none.

        It goes to a task of which no group is running, among those to the one with the fewest groups so far, then in
        an order that depends on the seed and differs between epochs. So a slow task holds one group's places, not
        ever more of them, and no task gets more than `LEAD` groups ahead of another.
        """
        if self._closed or self._groups_left == 0:
            return None
        task = self._next_task()
        if task is None:
            self._closed = True
            return None
        if self._groups_left is not None:
            self._groups_left -= 1
        group = Group(task, self._name_group(task), self._group_size, self._attempts, list(range(self._attempts)))
        self._begun[task.name] += 1
        self._active[group.name] = group
        return group

    def restore(self, groups: Iterable[Group]) -> None:
        """Count groups begun by an earlier runner of this run; those with pending attempts go on."""
        for group in groups:
            self._begun[group.task.name] += 1
            if self._groups_left is not None:
                self._groups_left = max(0, self._groups_left - 1)
            if group.pending:
                self._active[group.name] = group

    def ended(self, slot: Slot, *, scored: bool) -> list[Slot]:
        """An attempt has ended; the running ones that its group does not need any more."""
        group = self._active.get(slot.group)
        if group is None:
            return []
        group.flying.discard(slot.index)
        group.scored += scored
        surplus = self.give_up(slot.group) if group.scored >= group.size else []
        if group.ended:
            self._active.pop(slot.group, None)
        return surplus

    def give_up(self, name: str) -> list[Slot]:
        """Start nothing more of a group; what of it is running now."""
        group = self._active.get(name)
        if group is None:
            return []
        group.pending.clear()
        if group.ended:
            del self._active[name]
        return [Slot(group.task, name, index) for index in sorted(group.flying)]

    def close(self) -> None:
        """Begin no further group; the ones that have begun are completed."""
        self._closed = True

    def drop(self) -> None:
        """Hand out nothing any more."""
        self._closed = True
        for name in list(self._active):
            self.give_up(name)

    def _next_task(self) -> Task | None:
        running = Counter(group.task.name for group in self._active.values())
        open_tasks = [task for task in self._tasks if self._epochs is None or self._begun[task.name] < self._epochs]
        if not open_tasks:
            return None
        least = min(self._begun[task.name] for task in open_tasks)

        def order(task: Task) -> tuple[bool, int, int, int]:
            begun = self._begun[task.name]
            return begun >= least + LEAD, running[task.name], begun, self._place(begun, task)

        return min(open_tasks, key=order)

    def _place(self, epoch: int, task: Task) -> int:
        """A task's place in the order of an epoch."""
        if epoch not in self._places:
            order = [task.name for task in self._tasks]
            random.Random(f"{self._seed}:{epoch}").shuffle(order)
            self._places[epoch] = {name: place for place, name in enumerate(order)}
        return self._places[epoch][task.name]
