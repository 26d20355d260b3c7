"""Limits by cgroup v2, held by a real kernel without v1: the jobs of test_sandbox, and where a runner may hold them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.uml import python, run_in_guest

SANDBOX = "tests/harnesses/test_sandbox.py"
HELD = (
    f"{SANDBOX}::test_processes_and_memory_of_a_sandbox_are_held_by_its_cgroup[Bubblewrap]",
    f"{SANDBOX}::test_cgroups_of_dead_runners_are_ended_and_removed_and_those_of_living_ones_are_not",
)


@pytest.mark.long  # boots a kernel of its own, which not every machine that runs the tests may let it
def test_limits_are_held_by_cgroup_v2(tmp_path: Path) -> None:
    tests = ("tests/harnesses/cgroup2_in_guest.py", *HELD)
    done = run_in_guest(python("-m", "pytest", "-q", "-p", "no:cacheprovider", *tests), tmp_path / "init")
    assert done.status == 0, done.output[-5000:]
    assert "6 passed" in done.output
