"""One of two real engines is killed under load and started again: the figures of `bench/failover.py` are checked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import FindModel

BENCH = Path(__file__).resolve().parent.parent / "bench" / "failover.py"


@pytest.mark.long
@pytest.mark.engine
def test_agents_do_not_see_that_an_engine_was_killed(model_dir: FindModel) -> None:
    command = [sys.executable, str(BENCH), "--tokenizer", str(model_dir("smollm2-135m")), "--agents", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["client_errors"], found["breaks"], found["lost_adapters"]) == (0, 0, 0)
    assert found["store_verified"]
    assert found["continued_turns"] > 0
    assert found["adapter_turns_after"] > 0
    assert found["turns_while_down"] > 0
    assert abs(found["hit_share_one"] - found["hit_share_two"]) <= 0.05
