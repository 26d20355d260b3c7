"""Where a runner may hold sandboxes under cgroup v2, on a kernel that has it alone; run by test_cgroup2 in a guest.

Not collected by name: on a machine with v1 these would change the machine's own cgroups.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.harnesses.test_sandbox import shell
from turngate.harnesses.bubblewrap import Bubblewrap
from turngate.harnesses.cgroups import CONTROLLERS, Cgroups
from turngate.harnesses.sandbox import Limits

TOP = Path("/sys/fs/cgroup")
USER = 1000
MANY = "for n in $(seq 40); do sleep 0.5 & done"


@pytest.fixture
def session() -> Iterator[Path]:
    """A login session as systemd lays it out: a slice that hands controllers down, and in it a scope with processes."""
    place = TOP / "user.slice" / "session.scope"
    place.mkdir(parents=True)
    for above in (TOP, place.parent):
        (above / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in CONTROLLERS))
    yield place
    for folder in (place, place.parent):
        folder.rmdir()


def inside(place: Path, check: Callable[[], None], *, user: int = 0) -> None:
    """`check` in a process of its own that is in cgroup `place` and belongs to `user`."""
    child = os.fork()
    if child == 0:
        try:
            (place / "cgroup.procs").write_text(str(os.getpid()))
            os.setuid(user)
            check()
            os._exit(0)
        except BaseException:  # noqa: BLE001 - the child must never go on as pytest
            traceback.print_exc()
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


async def test_cores_of_a_sandbox_are_held(tmp_path: Path) -> None:
    cgroups = Cgroups.find()
    box = Bubblewrap(cgroups)
    burning = asyncio.create_task(shell("while :; do :; done", tmp_path, sandbox=box, limits=Limits(cpus=0.1)))
    while not burning.done() and throttled(cgroups) < 5:
        await asyncio.sleep(0.05)
    assert not burning.done()
    burning.cancel()
    await asyncio.wait([burning])
    cgroups.close()


def throttled(cgroups: Cgroups) -> int:
    """In how many periods the kernel held the sandboxes back."""
    counts = [file.read_text() for folder in cgroups.folders for file in folder.glob("s*/cpu.stat")]
    return sum(int(words.split()[1]) for text in counts for words in text.splitlines() if "nr_throttled" in words)


def test_in_a_session_sandboxes_stand_beside_it_and_are_held(session: Path, tmp_path: Path) -> None:
    def check() -> None:
        cgroups = Cgroups.find()
        assert cgroups.held == set(CONTROLLERS)
        assert [folder.parent for folder in cgroups.folders] == [session.parent]
        done = asyncio.run(shell(MANY, tmp_path, sandbox=Bubblewrap(cgroups), limits=Limits(processes=20)))
        assert "fork" in done.stderr
        cgroups.close()

    inside(session, check)


def test_another_user_holds_processes_where_the_slice_is_delegated(session: Path) -> None:
    for name in ("", "cgroup.procs", "cgroup.subtree_control"):
        os.chown(session.parent / name, USER, USER)

    def check() -> None:
        cgroups = Cgroups.find()
        assert cgroups.held == set(CONTROLLERS)
        made = cgroups.make(Limits(processes=20))
        done = subprocess.run(made.joining(["/bin/bash", "-c", MANY]), stderr=subprocess.PIPE, text=True)
        assert "fork" in done.stderr
        made.remove()
        cgroups.close()

    inside(session, check, user=USER)


def test_what_another_user_may_not_write_is_not_held_and_said(session: Path) -> None:
    def check() -> None:
        cgroups = Cgroups.find()
        assert cgroups.held == set()
        assert [line.split(":")[0] for line in Bubblewrap(cgroups).unenforced(Limits())] == ["memory", "processes"]

    inside(session, check, user=USER)
    assert [entry for entry in session.parent.iterdir() if entry.is_dir()] == [session]
