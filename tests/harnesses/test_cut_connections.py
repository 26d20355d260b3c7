"""Real agents whose connection is cut in the middle of an answer: they ask again, and get the one that was begun."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import FindModel
from tests.fake_engine.runner import FakeEngine
from tests.fake_engine.settings import FakeSettings
from tests.gateway_process import GatewayProcess
from tests.harnesses.conftest import StageMaker, TaskMaker
from tests.harnesses.cutter import Cutter
from tests.harnesses.test_opencode import assert_each_token_is_trained_once, leased_rows, recorded
from turngate.harnesses.rollout import run_rollout

ONE = "echo 1 > /logs/verifier/reward.txt"
CODEX_TRIES = ["-c", "model_providers.turngate.stream_max_retries=5"]


@pytest.fixture
def cut(model_dir: FindModel, tmp_path: Path) -> Iterator[Callable[..., tuple[GatewayProcess, FakeEngine, Cutter]]]:
    """`cut(script, path, cuts)`: gateway, engine, and the connection between the agents and the gateway."""
    with ExitStack() as stack:

        def start(script: Any, path: str, cuts: int) -> tuple[GatewayProcess, FakeEngine, Cutter]:
            folder = model_dir("qwen-coder-0.5b")
            engine = stack.enter_context(FakeEngine(folder, script=script, settings=FakeSettings(tokens_per_s=20.0)))
            cutter = stack.enter_context(Cutter(path, cuts))
            options = ("--tokenizer", str(folder), "--public-url", cutter.url, "--reattach-s", "120")
            gateway = GatewayProcess(engine.url, tmp_path / "store", *options)
            cutter.to_port = gateway.port
            stack.enter_context(gateway)
            return gateway, engine, cutter

        yield start


@pytest.mark.harness
@pytest.mark.parametrize(
    ("harness", "path", "tool", "options"),
    [
        ("codex", "/responses", "exec_command", {"extra_args": CODEX_TRIES}),
        ("claude-code", "/messages", "Bash", {"context_tokens": 32000}),
    ],
)
async def test_a_cut_answer_is_told_again_from_its_start(
    cut: Callable[..., tuple[GatewayProcess, FakeEngine, Cutter]],
    make_stage: StageMaker,
    make_task: TaskMaker,
    harness: str,
    path: str,
    tool: str,
    options: dict[str, Any],
) -> None:
    name = "cmd" if tool == "exec_command" else "command"
    call = {"name": tool, "arguments": {name: "echo 1 > a.txt", "description": "x"}}
    script = [{"content": "I will write the file now. " * 3, "tool_calls": [call]}, "All of it is done now. " * 3]
    gateway, engine, cutter = cut(script, path, cuts=3)
    probes = engine.engine.generations
    stage = make_stage(gateway, harness=harness, group_size=2, history="append", harness_options=options)
    result = await run_rollout(stage, make_task("cat a.txt && " + ONE), "group")
    assert (result.outcome, result.reward) == ("scored", 1.0), result.detail
    found = recorded(gateway, result)
    assert (cutter.cuts, len(cutter.requests)) == (0, len(found) + 3)
    assert [turn.kind for turn in found] == ["first", "spliced"]
    assert (engine.engine.generations - probes, engine.engine.aborted) == (2, 0)
    assert_each_token_is_trained_once(leased_rows(gateway, result), found, {"main"})
