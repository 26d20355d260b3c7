"""Stores of every schema there has been open, hold what they held and go on; a later schema is refused with words."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from tests.proxy.store.samples import make_rollout_turns
from turngate.proxy import wire
from turngate.proxy.cli import main
from turngate.proxy.store.control import ControlStore
from turngate.proxy.store.control_schema import MIGRATIONS as CONTROL
from turngate.proxy.store.errors import SchemaTooNew
from turngate.proxy.store.layout import StoreFolder
from turngate.proxy.store.reader import StoreReader
from turngate.proxy.store.turnstore import MIGRATIONS as TURNS
from turngate.proxy.store.turnstore import TurnStore
from turngate.proxy.verify import verify_store

RELEASED = sorted(path for path in (Path(__file__).parent / "released").iterdir() if path.name.startswith("control-"))


@pytest.fixture(params=RELEASED, ids=lambda path: path.name)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> StoreFolder:
    """A copy of a store that an earlier release left."""
    return StoreFolder(Path(shutil.copytree(request.param, tmp_path / "store")))


def opened(folder: StoreFolder) -> tuple[ControlStore, TurnStore]:
    """As the gateway opens it, which brings it up to date."""
    return ControlStore(folder.control), TurnStore(folder.turns(0))


def test_every_schema_has_its_fixture() -> None:
    kept = [tuple(int(part.partition("-")[2]) for part in path.name.split(".")) for path in RELEASED]
    words = "python -m tests.proxy.store.released.make tests/proxy/store/released"
    assert {control for control, _ in kept} == set(range(1, len(CONTROL) + 1)), words
    assert {turns for _, turns in kept} == set(range(1, len(TURNS) + 1)), words


def test_it_holds_what_it_held_and_verifies(folder: StoreFolder) -> None:
    for store in opened(folder):
        store.close()
    with StoreReader(folder.path) as reader:
        records = {record.id: record for record in reader.rollouts()}
        assert {record.id: record.state for record in records.values()} == {
            "rollout-0": "finished",
            "rollout-1": "finished",
            "rollout-open": "open",
        }
        assert [records[f"rollout-{number}"].reward for number in range(2)] == [0.0, 1.0]
        for rollout in ("rollout-0", "rollout-1"):
            for turn, wanted in zip(reader.turns(rollout), make_rollout_turns(rollout), strict=True):
                assert (turn.id, turn.seq, turn.base, turn.response) == (
                    wanted.id,
                    wanted.seq,
                    wanted.base,
                    wanted.response,
                )
                for name in ("tail_ids", "completion_ids", "logprobs"):
                    np.testing.assert_array_equal(getattr(turn, name), getattr(wanted, name))
    assert verify_store(folder.path).problems == []


def test_it_goes_on_where_it_was(folder: StoreFolder) -> None:
    control, turns = opened(folder)
    with control, turns:
        turns.commit(make_rollout_turns("rollout-open")[2:])
        done = control.finish_rollout(
            "rollout-open", wire.FinishRollout(reward=1.0), 50, seal=turns.seal("rollout-open")
        )
        assert (done.outcome, turns.counts("rollout-open").turns) == ("scored", 3)
        control.resume("policy", 0, 60)
        assert len(control.lease(wire.NewLease(policy="policy"), 70).groups) == 1
    assert verify_store(folder.path).problems == []


@pytest.mark.parametrize("file", ["control.sqlite", "turns-0.sqlite"])
@pytest.mark.parametrize("command", ["verify", "view", "export", "proxy"])
def test_a_later_schema_is_refused_with_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, file: str
) -> None:
    store = Path(shutil.copytree(RELEASED[-1], tmp_path / "store"))
    with sqlite3.connect(store / file) as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(SchemaTooNew, match="schema 99"):
        (ControlStore if file == "control.sqlite" else TurnStore)(store / file)
    argv = {
        "verify": [str(store)],
        "view": [str(store), "--no-browser", "--port", "0"],
        "export": [str(store), "--out", str(tmp_path / "out.jsonl")],
        "proxy": ["--engine", "http://127.0.0.1:9", "--store", str(store), "--port", "0"],
    }[command]
    assert main([command, *argv]) == 1
    said = capsys.readouterr()
    assert "use the release that wrote it, or a later one" in said.err + said.out
