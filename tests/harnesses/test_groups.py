"""The plan: which attempts come in which order."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path, PurePosixPath

from hypothesis import given
from hypothesis import strategies as st

from turngate.harnesses.groups import LEAD, Group, Plan, Slot
from turngate.tasks.harbor import Task

TASKS = [Task(f"t{n}", Path("/"), ("do",), PurePosixPath("/w"), None, 1.0, {}, 0.0, 1.0, None, "") for n in range(5)]


def plan(*, groups: int | None = None, epochs: int | None = None, size: int = 2, seed: int = 0, extra: int = 0) -> Plan:
    """A plan over five tasks with numbered groups."""
    numbers = itertools.count()
    name = lambda task: f"{task.name}:{next(numbers)}"  # noqa: E731
    return Plan(TASKS, group_size=size, groups=groups, epochs=epochs, seed=seed, name_group=name, extra=extra)


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


def test_an_oversampled_group_stops_at_its_size_of_scored_attempts() -> None:
    source = plan(size=2, extra=2)
    group = source.begin_group()
    assert group is not None
    first, second, third, fourth = (source.next_pending() for _ in range(4))
    assert source.ended(first, scored=False) == []
    assert source.ended(second, scored=True) == []
    assert source.ended(third, scored=True) == [fourth]
    assert not source.has_pending
    assert source.ended(fourth, scored=False) == []


def test_surplus_attempts_that_have_not_begun_never_begin() -> None:
    source = plan(size=1, extra=3, groups=1)
    source.begin_group()
    source.ended(source.next_pending(), scored=True)
    assert slots(source) == []


@given(seed=st.integers(), slow=st.sets(st.sampled_from([task.name for task in TASKS]), max_size=4))
def test_slow_tasks_hold_one_group_each_and_no_task_is_forgotten(seed: int, slow: set[str]) -> None:
    source, begun, running = plan(size=1, seed=seed), Counter[str](), Counter[str]()
    for _ in range(60):
        group = source.begin_group()
        assert group is not None
        slot = source.next_pending()
        begun[group.task.name] += 1
        running[group.task.name] += 1
        waiting = [task.name for task in TASKS if not running[task.name] and task.name != group.task.name]
        if running[group.task.name] > 1:
            assert all(begun[name] - min(begun.values()) >= 1 for name in waiting)
        if group.task.name not in slow:
            source.ended(slot, scored=True)
            running[group.task.name] -= 1
        assert max(begun.values()) - min(begun[task.name] for task in TASKS) <= LEAD
    assert set(begun) == {task.name for task in TASKS}


def test_places_go_to_the_task_with_the_fewest_running() -> None:
    source = plan(size=3)
    groups = [Group(task, task.name, 3, 3, [0, 1, 2]) for task in TASKS[:2]]
    source.restore(groups)
    assert [source.next_pending().group for _ in range(4)] == ["t0", "t1", "t0", "t1"]


def test_restored_groups_count_and_go_on_with_what_is_missing() -> None:
    source = plan(size=2, epochs=1)
    source.restore([Group(TASKS[0], "old", 2, 2, [1], scored=1), Group(TASKS[1], "done", 2, 2, [])])
    found = slots(source)
    assert (found[0].group, found[0].index) == ("old", 1)
    assert Counter(slot.task.name for slot in found) == {"t0": 1, "t2": 2, "t3": 2, "t4": 2}
