"""32 real agents at once for ten minutes leave no process, descriptor, sandbox, mount or session behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "bench" / "runner.py"
SLACK = {"runner_descriptors": 4, "runner_threads": 8, "gateway_descriptors": 8}
"""Pools that grow to their size once (threads, kept connections); what leaks grows with every rollout."""


@pytest.mark.long
@pytest.mark.harness
def test_ten_minutes_of_32_agents_leak_nothing(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = [sys.executable, str(PROGRAM), "--minutes", "10", "--starts", "0", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(out.read_text())["load"]
    assert found["most_in_flight"] == 32
    assert found["rollouts"] > 100
    leaked = {name: more for name, more in found["leaked"].items() if more > SLACK.get(name, 0)}
    assert leaked == {}, found
    assert found["after"]["open_sessions"] == 0
