"""Rollouts, groups and adapter versions: what the control store promises about each."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from turngate.proxy import wire
from turngate.proxy.store.control import ControlStore
from turngate.proxy.store.control_schema import MIGRATIONS
from turngate.proxy.store.errors import Conflict, Invalid, NotFound, SchemaTooNew, StoreBusy
from turngate.proxy.store.layout import StoreFolder
from turngate.proxy.store.records import RolloutFilter

SECOND_NS = 10**9


@pytest.fixture
def control(tmp_path: Path) -> Iterator[ControlStore]:
    with ControlStore(tmp_path / "control.sqlite", run="run1") as store:
        yield store


def create(control: ControlStore, name: str, now_ns: int = 1, **new: Any) -> None:
    values = {"task": "task", "group_size": 2 if "group" in new else None} | new
    control.create_rollout(name, name.encode(), wire.NewRollout(**values), "policy", 0, now_ns)


def finish(control: ControlStore, name: str, now_ns: int = 2, reward: float | None = 1.0, cause: str = "fault") -> None:
    if reward is None:
        result = wire.FinishRollout(outcome="unscorable", cause=cause)
    else:
        result = wire.FinishRollout(reward=reward)
    control.finish_rollout(name, result, now_ns)


def test_a_rollout_is_found_by_id_and_by_its_secrets_hash(control: ControlStore) -> None:
    create(control, "a", harness="pi", metadata={"x": [1, None]}, sampling={"temperature": 0.7})
    record = control.rollout_by_secret(b"a")
    assert record == control.rollout("a")
    assert (record.new.harness, record.new.metadata, record.state) == ("pi", {"x": [1, None]}, "open")
    for ask in (lambda: control.rollout("b"), lambda: control.rollout_by_secret(b"b")):
        with pytest.raises(NotFound):
            ask()


def test_finishing_twice_alike_is_fine_and_otherwise_a_conflict(control: ControlStore) -> None:
    create(control, "a")
    result = wire.FinishRollout(reward=0.1 + 0.2, rewards={"x": 1 / 3}, metrics={"steps": 3})
    first = control.finish_rollout("a", result, 5)
    assert control.finish_rollout("a", result, 9) == first
    assert (first.reward, first.finished_at_ns) == (0.1 + 0.2, 5)
    with pytest.raises(Conflict):
        control.finish_rollout("a", wire.FinishRollout(reward=1.0), 9)
    with pytest.raises(NotFound):
        finish(control, "nobody")


@pytest.mark.parametrize(
    "result", [wire.FinishRollout(), wire.FinishRollout(outcome="unscorable"), wire.FinishRollout(outcome="cancelled")]
)
def test_a_result_without_reward_or_cause_is_refused(control: ControlStore, result: wire.FinishRollout) -> None:
    create(control, "a")
    with pytest.raises(Invalid):
        control.finish_rollout("a", result, 5)
    assert control.open_rollouts()[0].id == "a"


def test_rollouts_are_filtered_and_paged(control: ControlStore) -> None:
    for number in range(10):
        create(control, f"r{number}", task=f"task{number % 2}", harness="pi" if number < 5 else "codex")
        if number < 8:
            finish(control, f"r{number}", reward=number / 10 if number % 4 else None)
    listed = control.rollouts(RolloutFilter(task="task1", limit=2))
    assert [record.id for record in listed] == ["r9", "r7"]
    assert [r.id for r in control.rollouts(RolloutFilter(task="task1", limit=2, after="r7"))] == ["r5", "r3"]
    oldest = control.rollouts(RolloutFilter(task="task1", limit=2, after="r1", oldest_first=True))
    assert [record.id for record in oldest] == ["r3", "r5"]
    assert {record.id for record in control.rollouts(RolloutFilter(min_reward=0.5))} == {"r5", "r6", "r7"}
    assert {record.id for record in control.rollouts(RolloutFilter(outcome="unscorable"))} == {"r0", "r4"}
    assert {record.id for record in control.rollouts(RolloutFilter(state="open"))} == {"r8", "r9"}
    assert len(control.rollouts(RolloutFilter(harness="pi"))) == 5


def test_a_group_is_ready_when_its_size_has_finished(control: ControlStore) -> None:
    for name in ("a", "b", "c"):
        create(control, name, group="g", group_size=3)
    finish(control, "a")
    finish(control, "b", reward=None)
    assert control.group("g").state == "open"
    finish(control, "c", now_ns=7)
    group = control.group("g")
    assert (group.state, group.ready_at_ns) == ("ready", 7)
    assert [record.id for record in control.group_rollouts("g")] == ["a", "b", "c"]


def test_too_few_survivors_drop_a_group_with_its_cause(control: ControlStore) -> None:
    for name in ("a", "b"):
        create(control, name, group="g")
    finish(control, "a")
    finish(control, "b", reward=None)
    assert (control.group("g").state, control.group("g").cause) == ("dropped", "too_few_survivors")


def test_a_deadline_closes_a_group_with_who_survived_and_without_the_late(control: ControlStore) -> None:
    for name in ("a", "b", "c"):
        create(control, name, now_ns=0, group="g", group_size=3, group_deadline_s=10)
        create(control, name + "x", now_ns=0, group="few", group_size=3, group_deadline_s=10)
    for name in ("a", "b", "ax"):
        finish(control, name)
    assert control.lease(wire.NewLease(policy="policy"), 10 * SECOND_NS - 1).groups == ()
    assert control.lease(wire.NewLease(policy="policy"), 10 * SECOND_NS).groups == ("g",)
    assert control.group("few").cause == "too_few_survivors"
    finish(control, "c", now_ns=11 * SECOND_NS)
    assert [record.id for record in control.group_rollouts("g")] == ["a", "b"]
    assert control.rollout("c").outcome == "scored"


def test_what_cannot_join_a_group_is_told_why(control: ControlStore) -> None:
    with pytest.raises(Invalid, match="group_size"):
        create(control, "a", group="g", group_size=None)
    create(control, "a", group="g")
    with pytest.raises(Conflict, match="of task task"):
        create(control, "b", group="g", task="other")
    with pytest.raises(Conflict, match="waits for 2"):
        create(control, "b", group="g", group_size=5)
    create(control, "b", group="g", group_size=None)
    finish(control, "a")
    finish(control, "b")
    with pytest.raises(Conflict, match="closed"):
        create(control, "c", group="g")
    assert {record.id for record in control.rollouts()} == {"a", "b"}


def test_evaluation_rollouts_are_never_leased(control: ControlStore) -> None:
    for name in ("a", "b"):
        create(control, name, group="g", training=False)
        finish(control, name)
    assert control.lease(wire.NewLease(policy="policy"), 9).groups == ()
    with pytest.raises(NotFound):
        control.group("g")


def test_versions_grow_and_a_failed_one_is_kept_with_its_cause(control: ControlStore) -> None:
    assert control.allocate_version("policy", "/one", 1, 5) == (1, "policy-run1-v1")
    control.set_adapter_state("policy", 1, "live")
    assert control.allocate_version("policy", "/two", 2, 6) == (2, "policy-run1-v2")
    control.set_adapter_state("policy", 2, "failed", "no such folder")
    assert control.allocate_version("policy", "/three", 2, 7)[0] == 3
    assert control.allocate_version("other", "/one", 1, 8) == (1, "other-run1-v1")
    assert [(a.version, a.state, a.cause) for a in control.adapters("policy")] == [
        (1, "live", None),
        (2, "failed", "no such folder"),
        (3, "loading", None),
    ]
    with pytest.raises(NotFound):
        control.set_adapter_state("policy", 9, "live")


def test_open_rollouts_pin_their_version(control: ControlStore) -> None:
    control.allocate_version("policy", "/one", 1, 5)
    new = wire.NewRollout(task="task")
    for name in ("a", "b"):
        control.create_rollout(name, name.encode(), new, "policy", 1, 6)
    finish(control, "a")
    assert control.pinned("policy") == {1: 1}
    assert control.adapter("policy", 1).sessions == 1


def test_a_version_allocated_before_a_kill_is_not_given_again(tmp_path: Path) -> None:
    path = tmp_path / "control.sqlite"
    program = (
        "import os, signal, sys; from pathlib import Path; from turngate.proxy.store.control import ControlStore;"
        "store = ControlStore(Path(sys.argv[1]), run='run1');"
        "print(store.allocate_version('policy', '/x', 1, 1)[0], flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    seen = []
    for _ in range(3):
        killed = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=False)
        assert killed.returncode == -signal.SIGKILL
        seen.append(int(killed.stdout))
    with ControlStore(path, run="another-name-changes-nothing") as store:
        seen.append(store.allocate_version("policy", "/x", 1, 1)[0])
        assert store.run_id() == "run1"
    assert seen == [1, 2, 3, 4]


def test_the_summary_counts_what_there_is(control: ControlStore) -> None:
    for number in range(40):
        create(control, f"r{number:02}")
        if number < 36:
            finish(control, f"r{number:02}", now_ns=number, reward=float(number), cause="sandbox")
    finish(control, "r36", reward=None, cause="sandbox")
    summary = control.summary()
    assert (summary.open_rollouts, summary.finished_rollouts, summary.scored_rollouts) == (3, 37, 36)
    assert summary.unscorable == {"sandbox": 1}
    assert summary.reward_mean_last == sum(range(4, 36)) / 32


def test_one_owner_and_no_newer_schema(tmp_path: Path) -> None:
    path = tmp_path / "control.sqlite"
    with ControlStore(path), pytest.raises(StoreBusy):
        ControlStore(path)
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 3}")
    connection.close()
    with pytest.raises(SchemaTooNew):
        ControlStore(path)


def test_a_store_folder_is_found_directly_or_in_its_run(tmp_path: Path) -> None:
    made = StoreFolder.create(tmp_path / "run" / "store", "run-1", 5)
    assert StoreFolder.create(made.path, "other", 9).run == "run-1"
    assert StoreFolder.find(tmp_path / "run") == StoreFolder.find(made.path) == made
    made.keep_stop_ids({7})
    made.keep_stop_ids([2])
    made.note(base_model="tiny")
    assert made.stop_ids() == {2, 7}
    assert made.facts()["base_model"] == "tiny"
    with pytest.raises(Invalid):
        StoreFolder.create(tmp_path / "x", "no/slashes", 1)
    made.note(format=99)
    with pytest.raises(SchemaTooNew):
        StoreFolder.find(made.path)


def test_an_oversampled_group_closes_at_its_size_of_scored_rollouts(control: ControlStore) -> None:
    for name in "abcd":
        create(control, name, group="g", group_size=2, group_attempts=4)
    finish(control, "a", reward=None)
    finish(control, "b", reward=1.0)
    assert control.group("g").state == "open"
    finish(control, "c", reward=0.0)
    assert control.group("g").state == "ready"
    finish(control, "d", reward=1.0)
    assert [record.id for record in control.group_rollouts("g")] == ["a", "b", "c"]


def test_an_oversampled_group_closes_when_its_attempts_have_ended(control: ControlStore) -> None:
    for name in "abc":
        create(control, name, group="g", group_size=2, group_attempts=3)
        finish(control, name, reward=None)
    assert control.group("g").state == "dropped"


def test_an_attempt_that_another_takes_the_place_of_does_not_count(control: ControlStore) -> None:
    for name in "abc":
        create(control, name, group="g")
    gone = wire.FinishRollout(outcome="cancelled", cause="runner_stopped", replaced=True)
    assert control.finish_rollout("a", gone, 2).replaced
    finish(control, "b")
    assert control.group("g").state == "open"
    finish(control, "c")
    assert [record.id for record in control.group_rollouts("g")] == ["b", "c"]
