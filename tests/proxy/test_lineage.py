"""Each scheduled group ends once; runner, gateway and checkpoint must tell the same of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from turngate.proxy import wire
from turngate.proxy.lineage import Checkpoint, compare, lineage_command, lineages
from turngate.proxy.store.control import ControlStore
from turngate.proxy.store.layout import StoreFolder
from turngate.proxy.store.records import GroupOutcome

TRAINED = GroupOutcome("a", "task", "trained", 1, None, 1)
FLAT = GroupOutcome("b", "task", "zero_variance", 2, None, 1)
FEW = GroupOutcome("c", "task", "dropped", None, "too_few_survivors", 0)
LAST = Checkpoint(1, {"a": 1})


def test_groups_that_ended_once_have_no_problem() -> None:
    found = compare("policy", [TRAINED, FLAT, FEW], [("a", "task"), ("d", "task")], LAST)
    assert found.ok
    told = found.as_json()
    assert [told[key] for key in ("scheduled", "trained", "zero_variance", "dropped")] == [4, 1, 1, 2]
    assert told["dropped_for"] == {"too_few_survivors": 1, "never_started": 1}


def test_a_group_without_an_end_is_not_ok_but_no_problem() -> None:
    found = compare("policy", [TRAINED, GroupOutcome("e", "task", "leased", None, None, 0)], [], LAST)
    assert (found.ok, found.unsettled, found.problems) == (False, ["e"], [])


@pytest.mark.parametrize(
    ("group", "lineage", "said"),
    [
        (GroupOutcome("a", "task", "trained", 1, None, 2), {"a": 1}, "2 acknowledgements"),
        (TRAINED, {}, "it is not in it"),
        (TRAINED, {"a": 2}, "there it is of step 2"),
        (FLAT, {"b": 1}, "zero_variance by the store, trained in step 1"),
        (GroupOutcome("a", "task", "dropped", None, None, 0), {}, "without a cause"),
        (TRAINED, {"a": 1, "z": 1}, "unknown to the store"),
        (FEW, {}, "step 1: no group was trained in it"),
    ],
)
def test_records_that_differ_are_problems(group: GroupOutcome, lineage: Mapping[str, int], said: str) -> None:
    step = max(lineage.values(), default=1)
    found = compare("policy", [group], [], Checkpoint(step, lineage))
    assert any(said in problem for problem in found.problems), found.problems
    assert not found.ok


def make_run(run: Path) -> None:
    """A run of one trained and one flat group, with its checkpoint and a journal cut by a kill."""
    folder = StoreFolder.create(run / "store", "test", 1)
    with ControlStore(folder.control, run="test") as store:
        for name in ("a", "b"):
            for number in range(2):
                new = wire.NewRollout(task="task", group=name, group_size=2)
                store.create_rollout(f"{name}{number}", f"{name}{number}".encode(), new, "policy", 0, 1)
                store.finish_rollout(f"{name}{number}", wire.FinishRollout(reward=float(number)), 2)
        grant = store.lease(wire.NewLease(policy="policy", max_groups=2), 3)
        for name, fate in (("a", "trained"), ("b", "zero_variance")):
            told = wire.GroupAck.model_validate({"group": name, "fate": fate})
            store.ack(grant.id, wire.AckLease(epoch=grant.epoch, step=1, groups=[told]), 4)
        store.durable("policy", 1, "/moved/away/checkpoint-1", 5)
    (run / "checkpoints" / "checkpoint-1").mkdir(parents=True)
    (run / "checkpoints" / "checkpoint-1" / "turngate.json").write_text(json.dumps({"lineage": {"a": 1}}))
    (run / "runner").mkdir()
    lines = [{"run": "r"}, *({"group": name, "task": "task", "size": 2, "attempts": 2} for name in ("a", "b", "c"))]
    journal = "\n".join(json.dumps(line) for line in lines)
    (run / "runner" / "journal.jsonl").write_text(journal + '\n{"group": "d", "ta')


def test_the_command_reads_journal_store_and_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path)
    (found,) = lineages(tmp_path)
    assert {group.id: group.state for group in found.groups} == {"a": "trained", "b": "zero_variance", "c": "dropped"}
    assert lineage_command([str(tmp_path), "--json", "--groups"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["ok"], told["step"], told["scheduled"]) == (True, 1, 3)
    assert told["groups"][0] == {"group": "a", "task": "task", "end": "trained", "step": 1, "cause": None}
    assert lineage_command([str(tmp_path / "store")]) == 0
    assert "2 groups scheduled" not in capsys.readouterr().err


def test_a_problem_is_exit_status_1_and_no_run_is_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path)
    (tmp_path / "checkpoints" / "checkpoint-1" / "turngate.json").write_text(json.dumps({"lineage": {}}))
    assert lineage_command([str(tmp_path), "--groups"]) == 1
    assert "✗ a: trained in step 1 by the store" in capsys.readouterr().out
    assert lineage_command([str(tmp_path / "nothing")]) == 2
