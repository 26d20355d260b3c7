"""Only whole checkpoints count."""

from __future__ import annotations

from pathlib import Path

import pytest

from turngate.trainer.checkpoint import MARKER, RunState, folder_of, newest_complete, prune, seal, verify
from turngate.trainer.errors import CheckpointTorn


def write(root: Path, step: int, *, sealed: bool = True) -> Path:
    folder = folder_of(root, step)
    folder.mkdir(parents=True)
    (folder / "optimizer.pt").write_bytes(bytes(range(256)) * step)
    (folder / "trainer_state.json").write_text("{}")
    if sealed:
        seal(folder, RunState(step, step + 10, "p", lineage={f"g{step}": step}))
    return folder


def test_the_state_comes_back_as_it_was_sealed(tmp_path: Path) -> None:
    assert verify(write(tmp_path, 3)) == RunState(3, 13, "p", True, {"g3": 3})


def test_nothing_written_means_nothing_to_resume(tmp_path: Path) -> None:
    assert newest_complete(tmp_path / "absent") is None


def test_the_newest_is_by_step_not_by_name(tmp_path: Path) -> None:
    for step in (9, 10, 2):
        write(tmp_path, step)
    found = newest_complete(tmp_path)
    assert found is not None
    assert found[1].step == 10


@pytest.mark.parametrize("harm", ["no marker", "cut file", "changed byte", "lost file", "cut marker"])
def test_a_torn_newest_falls_back_to_the_one_before(tmp_path: Path, harm: str) -> None:
    write(tmp_path, 1)
    newest = write(tmp_path, 2)
    data = newest / "optimizer.pt"
    if harm == "no marker":
        (newest / MARKER).unlink()
    elif harm == "cut file":
        data.write_bytes(data.read_bytes()[:-1])
    elif harm == "changed byte":
        data.write_bytes(b"\xff" + data.read_bytes()[1:])
    elif harm == "lost file":
        data.unlink()
    else:
        (newest / MARKER).write_text((newest / MARKER).read_text()[:-3])
    with pytest.raises(CheckpointTorn):
        verify(newest)
    found = newest_complete(tmp_path)
    assert found is not None
    assert found[1].step == 1


def test_pruning_keeps_the_newest_sealed_ones_and_drops_older_torn_ones(tmp_path: Path) -> None:
    for step in (1, 2, 3, 5):
        write(tmp_path, step)
    write(tmp_path, 4, sealed=False)
    prune(tmp_path, 2)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["checkpoint-3", "checkpoint-4", "checkpoint-5"]
