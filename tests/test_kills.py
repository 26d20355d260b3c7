"""Trainer, runner, gateway and engine killed in one real run: the figures of `bench/kills.py` are checked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import FindModel

BENCH = Path(__file__).resolve().parent.parent / "bench" / "kills.py"


@pytest.mark.long
@pytest.mark.engine
@pytest.mark.harness
def test_every_group_ends_once_whatever_is_killed_and_nothing_is_left(model_dir: FindModel, tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH), "--tokenizer", str(model_dir("smollm2-135m")), "--kills", "12"]
    done = subprocess.run([*command, "--keep", str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["killed"] == dict.fromkeys(("engine", "gateway", "runner", "trainer"), 3)
    assert found["steps"] == found["steps_planned"] == found["lineage"]["step"]
    assert found["lineage"]["problems"] == []
    assert found["lineage"]["scheduled"] == sum(
        found["lineage"][end] for end in ("trained", "zero_variance", "dropped")
    )
    assert found["had_current"] == found["engine_restarts"] == 3
    assert found["turns_after"] > 0
    assert found["exact_rows"] == found["rows"] > 0
    assert not any(found["orphans"].values())
