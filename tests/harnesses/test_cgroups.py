"""Where cgroups can be made, read from what Linux says of itself; v2 on a folder that looks like one."""

from __future__ import annotations

import os
from pathlib import Path

from turngate.harnesses.cgroups import Cgroups, find_places
from turngate.harnesses.owner import is_dead, owner_id
from turngate.harnesses.sandbox import Limits


def test_v1_controllers_are_found_each_in_its_own_hierarchy(tmp_path: Path) -> None:
    for name in ("pids", "memory/box", "cpu,cpuacct"):
        (tmp_path / name).mkdir(parents=True)
    mounts = (
        f"30 25 0:26 / {tmp_path}/pids rw - cgroup cgroup rw,pids\n"
        f"31 25 0:27 /docker/abc {tmp_path}/memory rw - cgroup cgroup rw,memory\n"
        f"32 25 0:28 / {tmp_path}/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
        f"33 25 0:29 / {tmp_path}/unified rw - cgroup2 cgroup2 rw\n"
    )
    own = "4:pids:/\n3:memory:/docker/abc/box\n2:cpu,cpuacct:/\n0::/\n"
    assert find_places(mounts, own) == {
        "pids": tmp_path / "pids",
        "memory": tmp_path / "memory" / "box",
        "cpu": tmp_path / "cpu,cpuacct",
    }


def test_what_does_not_exist_or_may_not_be_written_is_not_found(tmp_path: Path) -> None:
    mounts = f"30 25 0:26 / {tmp_path}/gone rw - cgroup cgroup rw,pids\n31 25 0:27 / / rw - ext4 /dev/vda rw\n"
    assert find_places(mounts, "4:pids:/\n") == {}


def test_v2_limits_are_written_in_its_own_words(tmp_path: Path) -> None:
    """A plain folder stands for the hierarchy, so files that the kernel would make are made here."""
    place = tmp_path / "scope"
    folder = place / f"turngate-{owner_id()}"
    (folder / "s1").mkdir(parents=True)
    for at in (place, folder, folder / "s1"):
        (at / "cgroup.controllers").write_text("cpu memory pids io\n")
        (at / "cgroup.subtree_control").write_text("")
        (at / "cgroup.procs").write_text("")
    mounts = f"33 25 0:29 / {tmp_path} rw - cgroup2 cgroup2 rw\n"
    places = find_places(mounts, "0::/scope\n")
    assert places == dict.fromkeys(("pids", "memory", "cpu"), place)
    cgroups = Cgroups.find(places)
    assert cgroups.held == {"pids", "memory", "cpu"}
    made = cgroups.make(Limits(processes=9, memory_bytes=1 << 27, cpus=1.5))
    told = {
        name: (folder / "s1" / name).read_text() for name in ("pids.max", "memory.max", "memory.swap.max", "cpu.max")
    }
    assert told == {"pids.max": "9", "memory.max": str(1 << 27), "memory.swap.max": "0", "cpu.max": "150000 100000"}
    (folder / "s1" / "memory.events").write_text("oom 1\noom_kill 2\noom_group_kill 0\n")
    assert made.oom_kills() == 2
    assert made.joining(["a", "b"])[-4:] == [str(folder / "s1" / "cgroup.procs"), "--", "a", "b"]


def test_an_owner_is_dead_only_when_that_can_be_known() -> None:
    mine = owner_id()
    where, pid, ticks = mine.split(".")
    assert not is_dead(mine)
    assert is_dead(f"{where}.{pid}.{int(ticks) - 1}")
    assert is_dead(f"{where}.4194999.1")
    assert not is_dead(f"another-machine.{pid}.1")
    assert not is_dead("something else")
    assert os.getpid() == int(pid)
