"""The demo from end to end, as `make demo` starts it: real vLLM, real pi, real trainer, judged by its last line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.long
def test_the_demo_ends_with_exact_rows_and_new_versions(tmp_path: Path) -> None:
    settings = [f"out={tmp_path}"]
    if "TURNGATE_TEST_ENGINE_URL" in os.environ:
        settings.append(f"engine.url={os.environ['TURNGATE_TEST_ENGINE_URL']}")
    done = subprocess.run(
        [sys.executable, "launch.py", "examples/demo.yaml", *settings], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["breaks"] == 0
    assert found["exact_rows"] == found["rows"] > 0
    assert found["spliced"] >= found["rollouts"]
    assert found["steps"] >= 5
    assert found["adapter_versions"] >= 5
    assert found["trained_tokens"] > 0
    lines = [json.loads(line) for line in next(tmp_path.glob("*/metrics.jsonl")).read_text().splitlines()]
    compared = [line for line in lines if "exact/ratio_mean" in line]
    assert compared
    assert all(0.98 <= line["exact/ratio_mean"] <= 1.02 for line in compared)
