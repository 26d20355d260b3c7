"""One of two real engines is killed under load and started again: the figures of `bench/failover.py` are checked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.failover import problems
from tests.conftest import FindModel

BENCH = Path(__file__).resolve().parent.parent / "bench" / "failover.py"


@pytest.mark.long
@pytest.mark.engine
def test_agents_do_not_see_that_an_engine_was_killed(model_dir: FindModel) -> None:
    command = [sys.executable, str(BENCH), "--tokenizer", str(model_dir("smollm2-135m")), "--agents", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert json.loads(done.stdout.splitlines()[-1])["problems"] == []


def test_a_run_with_all_as_it_must_be_has_no_problem_and_the_kept_one_is_such() -> None:
    kept = json.loads((BENCH.parent / "results" / "failover-cpu.json").read_text())
    assert problems(kept) == kept["problems"] == []
    assert problems(kept | {"hit_share_killed": 0.99}) == []


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"client_errors": 1}, "client_errors is 1"),
        ({"breaks": 2}, "breaks is 2"),
        ({"lost_adapters": 3}, "lost_adapters is 3"),
        ({"continued_turns": 0}, "shows nothing"),
        ({"adapter_turns_after": 0}, "shows nothing"),
        ({"hit_share_one": 0.90, "hit_share_two": 0.84}, "two engines found 84.0%"),
        ({"hit_share_one": 0.80, "hit_share_two": 0.86}, "a single one 80.0%"),
        ({"hit_share_one": 0.90, "hit_share_two": 0.90, "hit_share_killed": 0.84}, "one of two killed 84.0%"),
        ({"store_verified": False}, "verify"),
    ],
)
def test_whatever_is_not_as_it_must_be_is_a_problem(wrong: dict[str, Any], words: str) -> None:
    kept = json.loads((BENCH.parent / "results" / "failover-cpu.json").read_text())
    (problem,) = problems(kept | wrong)
    assert words in problem
