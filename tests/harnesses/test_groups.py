"""The plan: which attempts come in which order."""

from __future__ import annotations

import itertools
from pathlib import Path, PurePosixPath

from hypothesis import given
from hypothesis import strategies as st

from turngate.harnesses.groups import Plan, Slot
from turngate.tasks.harbor import Task

TASKS = [Task(f"t{n}", Path("/"), ("do",), PurePosixPath("/w"), None, 1.0, {}, 0.0, 1.0, None, "") for n in range(5)]


def plan(*, groups: int | None = None, epochs: int | None = None, size: int = 2, seed: int = 0) -> Plan:
    """A plan over five tasks with numbered groups."""
    numbers = itertools.count()
    name = lambda task: f"{task.name}:{next(numbers)}"  # noqa: E731
    return Plan(TASKS, group_size=size, groups=groups, epochs=epochs, seed=seed, name_group=name)


def slots(source: Plan) -> list[Slot]:
    """Everything the plan hands out, while nothing ends."""
    found = []
    while source.has_pending or source.begin_group():
        found.append(source.next_pending())
    return found


@given(epochs=st.integers(1, 4), size=st.integers(1, 5), seed=st.integers())
def test_each_task_comes_once_an_epoch_as_one_whole_group(epochs: int, size: int, seed: int) -> None:
    found = slots(plan(epochs=epochs, size=size, seed=seed))
    assert [slot.index for slot in found] == list(range(size)) * (5 * epochs)
    for epoch in range(epochs):
        part = found[epoch * 5 * size : (epoch + 1) * 5 * size]
        assert {slot.task.name for slot in part} == {task.name for task in TASKS}
        assert all(len({slot.group for slot in part[n * size : (n + 1) * size]}) == 1 for n in range(5))
    assert len({slot.group for slot in found}) == 5 * epochs


def test_the_order_depends_on_the_seed_and_differs_between_epochs() -> None:
    def order(seed: int) -> list[str]:
        return [slot.task.name for slot in slots(plan(epochs=3, size=1, seed=seed))]

    assert order(7) == order(7)
    assert order(7) != order(8)
    assert order(7)[:5] != order(7)[5:10]


def test_the_number_of_groups_can_be_limited() -> None:
    assert len(slots(plan(groups=3, size=4))) == 12


def test_closing_completes_the_group_that_has_begun() -> None:
    source = plan(size=3)
    assert source.begin_group()
    source.next_pending()
    source.close()
    assert len(slots(source)) == 2


def test_dropping_hands_out_nothing_more() -> None:
    source = plan(size=3)
    assert source.begin_group()
    source.drop()
    assert slots(source) == []
