"""Pruning takes out what nothing can train any more, whole groups at a time, and leaves a sound store behind."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.proxy.store.samples import STOP_ID, make_rollout_turns
from turngate.proxy import wire
from turngate.proxy.rows import build_rows
from turngate.proxy.store.control import ControlStore
from turngate.proxy.store.layout import StoreFolder
from turngate.proxy.store.prune import STATES, Choice, Pruner
from turngate.proxy.store.prune_command import prune_command
from turngate.proxy.store.reader import StoreReader
from turngate.proxy.store.turnstore import TurnStore
from turngate.proxy.verify import verify_store

ALL = frozenset(STATES)
FATES: tuple[wire.GroupFate, ...] = ("trained", "zero_variance", "dropped")


class Making:
    """A store being made: groups of two rollouts, brought as far as a test wants."""

    def __init__(self, path: Path) -> None:
        self.folder = StoreFolder.create(path, "run1", 1)
        self.folder.keep_stop_ids({STOP_ID})
        self.control = ControlStore(self.folder.control, run="run1")
        self.turns = TurnStore(self.folder.turns(0))
        self.now = 0

    def rollout(self, name: str, group: str | None = None, *, finish: bool = True, scored: bool = True) -> str:
        self.now += 1
        new = wire.NewRollout(task="t", group=group, group_size=2 if group else None, training=True)
        self.control.create_rollout(name, hashlib.sha256(name.encode()).digest(), new, "policy", 0, self.now)
        self.turns.commit(make_rollout_turns(name))
        if finish:
            result = wire.FinishRollout(reward=1.0)
            if not scored:
                result = wire.FinishRollout(outcome="unscorable", cause="sandbox")
            self.now += 1
            self.control.finish_rollout(name, result, self.now, seal=self.turns.seal(name))
        return name

    def group(self, name: str, *, scored: bool = True) -> None:
        for number in range(2):
            self.rollout(f"{name}-{number}", name, scored=scored)

    def lease_all(self, fates: dict[str, wire.GroupFate], *, step: int = 1, durable: bool) -> None:
        grant = self.control.lease(wire.NewLease(policy="policy", max_groups=99), self.now)
        for group in grant.groups:
            for record in self.control.group_rollouts(group):
                self.control.record_served(build_rows(self.turns.turns(record.id)))
        told = [wire.GroupAck(group=group, fate=fate) for group, fate in fates.items()]
        self.control.ack(grant.id, wire.AckLease(epoch=grant.epoch, step=step, groups=told), self.now)
        if durable:
            self.control.durable("policy", step, "checkpoint", self.now)

    def close(self) -> Path:
        self.turns.close()
        self.control.close()
        return self.folder.path


@pytest.fixture
def making(tmp_path: Path) -> Iterator[Making]:
    made = Making(tmp_path / "store")
    yield made
    made.close()


def left(store: Path) -> set[str]:
    """Rollouts in both databases; a sound store has the same in each."""
    assert verify_store(store).ok
    with StoreReader(store) as reader:
        kept = {record.id for record in reader.rollouts()}
        assert {rollout for turns in reader.stores for rollout in turns.rollouts()} == kept
    return kept


def prune(store: Path, choice: Choice) -> int:
    with Pruner(store) as pruner:
        return len(pruner.prune(pruner.choose(choice)).units)


def test_what_may_still_be_trained_stays(making: Making) -> None:
    making.group("leased")
    making.lease_all({}, durable=False)
    making.group("ready")
    making.rollout("half-0", "half")
    making.rollout("open", finish=False)
    assert prune(making.close(), Choice(ALL)) == 0
    assert left(making.folder.path) == {"leased-0", "leased-1", "ready-0", "ready-1", "half-0", "open"}


def test_settled_groups_stay_until_a_checkpoint_has_them(making: Making) -> None:
    for fate in FATES:
        making.group(fate)
    making.lease_all({fate: fate for fate in FATES}, durable=False)
    assert prune(making.close(), Choice(ALL)) == 0


def test_settled_groups_go_once_a_checkpoint_has_them(making: Making) -> None:
    for fate in FATES:
        making.group(fate)
    making.lease_all({fate: fate for fate in FATES}, durable=True)
    store = making.close()
    assert prune_command([str(store), "--older-than", "0s"]) == 0
    assert left(store) == {"trained-0", "trained-1"}
    assert prune(store, Choice(frozenset({"trained"}))) == 1
    assert left(store) == set()


def test_failed_groups_and_rollouts_without_a_group_go(making: Making) -> None:
    making.group("failed", scored=False)
    making.rollout("alone")
    store = making.close()
    assert prune(store, Choice(frozenset({"dropped"}))) == 1
    assert left(store) == {"alone"}
    assert prune(store, Choice(frozenset({"scored"}))) == 1
    assert left(store) == set()


def test_a_failed_group_with_an_open_rollout_stays_whole(making: Making) -> None:
    making.rollout("late", "failed", finish=False)
    for number in range(2):
        making.rollout(f"failed-{number}", "failed", scored=False)
    assert prune(making.close(), Choice(ALL)) == 0


def test_the_oldest_go_until_the_size_is_reached_and_the_disk_has_the_space_back(making: Making) -> None:
    names = [making.rollout(f"alone-{number:03}") for number in range(200)]
    store = making.close()
    with Pruner(store) as pruner:
        size = pruner.size_bytes()
        goal = size - sum(unit.stored_bytes for unit in pruner.choose(Choice(ALL))) // 2
        done = pruner.prune(pruner.choose(Choice(ALL, max_bytes=goal)))
    gone = [rollout for unit in done.units for rollout in unit.rollouts]
    assert gone == names[: len(gone)]
    assert 80 < len(gone) < 120
    assert done.after_bytes < size * 0.8
    assert left(store) == set(names[len(gone) :])


def test_only_what_finished_before_a_time_goes(making: Making) -> None:
    making.rollout("old")
    before_ns = making.now + 1
    making.rollout("new")
    store = making.close()
    assert prune(store, Choice(ALL, before_ns=before_ns)) == 1
    assert left(store) == {"new"}


def test_a_dry_run_changes_nothing_and_says_what_would_go(making: Making, capsys: pytest.CaptureFixture[str]) -> None:
    making.rollout("alone")
    store = making.close()
    assert prune_command([str(store), "--older-than", "0s", "--dry-run", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["rollouts"], said["turns"], said["states"]) == (1, 3, {"scored": 1})
    assert left(store) == {"alone"}


def test_a_prune_that_was_killed_is_completed_by_the_next(making: Making) -> None:
    making.rollout("alone")
    making.rollout("kept", finish=False)
    store = making.close()
    with Pruner(store) as pruner:
        pruner._forget([], ["alone"])  # killed here
    with Pruner(store) as pruner:
        pruner.prune([])
    assert left(store) == {"kept"}


def test_a_store_whose_gateway_runs_is_refused_in_words(making: Making, capsys: pytest.CaptureFixture[str]) -> None:
    making.rollout("alone")
    assert prune_command([str(making.folder.path), "--older-than", "0s"]) == 1
    assert "owned by another running gateway; stop it" in capsys.readouterr().err


def test_a_pruned_store_is_served_on(making: Making) -> None:
    making.group("failed", scored=False)
    store = making.close()
    prune(store, Choice(ALL))
    again = Making(store)
    again.group("next")
    again.lease_all({"next": "trained"}, durable=True)
    again.close()
    assert left(store) == {"next-0", "next-1"}


@pytest.mark.parametrize("argv", [[], ["--older-than", "soon"], ["--max-size", "big"], ["--state", "open"]])
def test_wrong_usage_is_told(making: Making, argv: list[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        prune_command([str(making.close()), *argv])
    assert leaving.value.code == 2


def test_turns_of_every_worker_go_with_their_rollout(making: Making) -> None:
    with TurnStore(making.folder.turns(1)) as other:
        making.rollout("here")
        making.rollout("open", finish=False)
        other.commit(make_rollout_turns("far"))
        new = wire.NewRollout(task="t")
        making.control.create_rollout("far", b"far", new, "policy", 0, 99)
        making.control.finish_rollout("far", wire.FinishRollout(reward=1.0), 100, seal=other.seal("far"))
    assert prune(making.close(), Choice(ALL)) == 2
    assert left(making.folder.path) == {"open"}
