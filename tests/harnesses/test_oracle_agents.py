"""Demonstrations by real agents: the oracle plays solutions through the agent's own tools; the student's rows fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import FindModel
from tests.fake_engine.runner import FakeEngine
from tests.gateway_process import GatewayProcess
from tests.harnesses.conftest import StageMaker
from tests.harnesses.played import PLAYED
from turngate.harnesses.base import HarnessOptions
from turngate.harnesses.pi import Pi
from turngate.harnesses.rollout import Result, run_rollout
from turngate.proxy import wire
from turngate.proxy.rows import build_rows
from turngate.proxy.store.reader import StoreReader
from turngate.proxy.verify import verify_store
from turngate.tasks.dataops import write_set
from turngate.tasks.harbor import Task, load_task
from turngate.tasks.steps import load_steps


async def play(
    harness: str, names: tuple[str, ...], serve: Callable[..., GatewayProcess], make_stage: StageMaker, folder: Path
) -> tuple[GatewayProcess, dict[str, Result], dict[str, Task]]:
    write_set(folder / "set")
    gateway = serve(["the policy is never asked"])
    stage = make_stage(gateway, harness=harness, teacher="oracle", harness_options={"context_tokens": 32768})
    tasks = {name: load_task(folder / "set" / name) for name in names}
    return gateway, {name: await run_rollout(stage, task, task.name) for name, task in tasks.items()}, tasks


@pytest.mark.harness
@pytest.mark.parametrize(
    ("harness", "names"),
    [
        ("pi", PLAYED[::2]),  # all of them are played in test_dataops_pi
        ("opencode", PLAYED[7:8]),  # read and bash
        pytest.param("opencode", PLAYED[1:9:3], marks=pytest.mark.long),
        *(
            pytest.param(harness, PLAYED[1:9:3], marks=pytest.mark.long)
            for harness in ("gemini-cli", "claude-code", "codex", "mini-swe-agent", "openhands")
        ),
    ],
)
async def test_the_oracle_earns_1_and_its_rows_are_the_students_own_rendering(
    harness: str, names: tuple[str, ...], serve: Callable[..., GatewayProcess], make_stage: StageMaker, tmp_path: Path
) -> None:
    gateway, results, tasks = await play(harness, names, serve, make_stage, tmp_path)
    found = {name: (one.outcome, one.reward, one.turns, one.detail) for name, one in results.items()}
    assert found == {name: ("scored", 1.0, len(load_steps(task.folder)), "") for name, task in tasks.items()}
    assert gateway.client.status().breaks == {}
    with StoreReader(gateway.store) as reader:
        for record in reader.rollouts():
            turns = reader.turns(record.id)
            (row,) = build_rows(turns)
            assert all(turn.mode == "demonstration" for turn in turns)
            assert np.isnan(row.logprobs[row.mask]).all()
            assert (row.versions == -1).all()
    report = verify_store(gateway.store)
    assert (report.ok, report.rows, report.exact_rows) == (True, len(names), len(names))


@pytest.mark.harness
async def test_another_model_teaches_the_agent_and_the_student_is_never_asked(
    serve: Callable[..., GatewayProcess], make_stage: StageMaker, model_dir: FindModel, tmp_path: Path
) -> None:
    write_set(tmp_path / "set")
    task = load_task(tmp_path / "set" / "write-file-02")
    answers = [_as_answer(Pi().play(step, HarnessOptions())) for step in load_steps(task.folder)]
    with FakeEngine(model_dir("qwen-coder-0.5b"), answers) as teacher:
        endpoint = {"url": f"{teacher.url}/v1", "model": teacher.engine.settings.model}
        gateway = serve(["the policy is never asked"])
        stage = make_stage(gateway, teacher=endpoint, harness_options={"context_tokens": 32768})
        result = await run_rollout(stage, task, "group")
    assert (result.outcome, result.reward, result.turns, result.detail) == ("scored", 1.0, len(answers), "")
    assert verify_store(gateway.store).exact_rows == 1


def _as_answer(said: wire.SaidTurn) -> dict[str, Any]:
    return {"content": said.content, "tool_calls": [call.model_dump() for call in said.tool_calls]}
