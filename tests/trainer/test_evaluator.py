"""The evaluator against a real gateway: base, start, later steps and the end, pinned, paired, never trained."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import FindModel
from tests.fake_engine.runner import FakeEngine
from tests.fake_engine.script import Script
from tests.gateway_process import GatewayProcess
from turngate.harnesses.settings import RunSettings
from turngate.proxy import wire
from turngate.proxy.client import GatewayError
from turngate.trainer import eval_log
from turngate.trainer.eval_settings import EvalSettings
from turngate.trainer.evaluator import FINISH, Evaluator, EvaluatorSettings, read_settings


@pytest.fixture
def engines() -> list[FakeEngine]:
    """The engines that `serve` started."""
    return []


@pytest.fixture
def serve(model_dir: FindModel, tmp_path: Path, engines: list[FakeEngine]) -> Iterator[Callable[[Any], GatewayProcess]]:
    with ExitStack() as stack:

        def start(script: Any) -> GatewayProcess:
            folder = model_dir("qwen-coder-0.5b")
            engine = stack.enter_context(FakeEngine(folder, script=script))
            engines.append(engine)
            return stack.enter_context(GatewayProcess(engine.url, tmp_path / "store", "--tokenizer", str(folder)))

        yield start


def sets(folder: Path) -> list[str]:
    """Two held-out sets of one question each; only the first is answered right."""
    found = []
    for name, question in (("seen", "1+1"), ("unseen", "2+2")):
        (folder / name).mkdir()
        (folder / name / "rows.jsonl").write_text(json.dumps({"prompt": question, "solution": "$2$"}))
        found.append(str(folder / name))
    return found


def adapter(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    (folder / name / "adapter_config.json").write_text("{}")
    return folder / name


def evaluator(gateway: GatewayProcess, tmp_path: Path, tasks: list[str], **asked: Any) -> Evaluator:
    run = RunSettings(
        gateway=gateway.url, admin_key_file=gateway.store / "admin.key", policy="policy", harness="chat", solved_at=1.0
    )
    settings = EvaluatorSettings(
        output=tmp_path / "run", eval=EvalSettings(tasks=tasks, attempts=2, every_steps=5, **asked), run=run
    )
    return Evaluator(settings, gateway.client, say=lambda text: None)


def publish(gateway: GatewayProcess, folder: Path, step: int) -> wire.AdapterInfo:
    return gateway.client.publish_adapter(wire.PublishAdapter(policy="policy", path=str(folder), step=step))


def test_a_run_is_evaluated_from_the_base_to_its_end(serve: Callable[[Any], GatewayProcess], tmp_path: Path) -> None:
    gateway = serve({"1+1": [r"\boxed{2}"], "2+2": ["Five."]})
    tasks = sets(tmp_path)
    publish(gateway, adapter(tmp_path, "warm"), 0)
    asyncio.run(evaluator(gateway, tmp_path, tasks).follow(once=True))
    publish(gateway, adapter(tmp_path, "three"), 3)
    three = evaluator(gateway, tmp_path, tasks)
    assert three._due(three._current(), ending=False) is None
    assert three._due(three._current(), ending=True) == ("step-3", three._current())
    (tmp_path / "run" / "evals" / FINISH).touch()
    asyncio.run(three.follow())
    found = eval_log.read(tmp_path / "run")
    assert [(one["name"], one["version"], one["step"]) for one in found] == [
        ("base", 0, 0),
        ("start", 1, 0),
        ("step-3", 2, 3),
    ]
    for one in found:
        assert (one["attempts"], one["scored"], one["solved"]) == (4, 4, 2)
        assert [half["rate"] for half in one["by_set"].values()] == [1.0, 0.0]
    assert found[2]["versus_start"] == {"difference": 0.0, "ci": [0.0, 0.0], "tasks": 2}
    assert found[2]["versus_base"] == found[1]["versus_base"] == found[2]["versus_start"]
    best = json.loads((tmp_path / "run" / "best" / "evaluation.json").read_text())
    assert best["name"] == "start"
    assert gateway.client.lease(wire.NewLease(policy="policy", max_groups=9)).groups == []
    assert gateway.client.open_rollouts() == []


def test_the_adapter_that_solved_most_is_kept_also_when_later_ones_solve_less(
    serve: Callable[[Any], GatewayProcess], engines: list[FakeEngine], tmp_path: Path
) -> None:
    gateway = serve({"1+1": [r"\boxed{2}"], "2+2": ["Five."]})
    tasks = sets(tmp_path)
    publish(gateway, adapter(tmp_path, "warm"), 0)
    best, differences = [], []
    answers = {"1+1": [r"\boxed{2}"], "2+2": ["Five."]}, {"+": [r"\boxed{2}"]}, {"+": ["Five."]}
    for step, script in zip((0, 5, 10), answers, strict=True):
        engines[0].engine.script = Script.of(script)
        if step:
            publish(gateway, adapter(tmp_path, f"at-{step}"), step)
        asyncio.run(evaluator(gateway, tmp_path, tasks).follow(once=True))
        kept = tmp_path / "run" / "best"
        best.append(json.loads((kept / "evaluation.json").read_text())["step"])
        assert (kept / "adapter_config.json").exists()
        differences.append(eval_log.read(tmp_path / "run")[-1]["versus_base"]["difference"])
    assert best == [0, 5, 5]
    assert differences == [0.0, 0.5, -0.5]


def test_attempts_have_seeds_of_their_own_that_do_not_change(
    serve: Callable[[Any], GatewayProcess], engines: list[FakeEngine], tmp_path: Path
) -> None:
    gateway = serve([r"\boxed{2}"])
    tasks = sets(tmp_path)
    seeds = []
    for name in ("once", "again"):
        engines[0].engine.requests.clear()
        asyncio.run(evaluator(gateway, tmp_path / name, tasks).follow(once=True))
        asked = engines[0].seen("/inference/v1/generate")
        seeds.append(sorted((body["token_ids"], body["sampling_params"]["seed"]) for body in asked))
    assert seeds[0] == seeds[1]
    assert len({seed for _, seed in seeds[0]}) == len(seeds[0]) == 4, "two tasks, two attempts each"
    used: dict[str, list[int]] = {}
    for run in ("once", "again"):
        for line in (tmp_path / run / "run" / "evals" / "base-v0" / "runner.jsonl").read_text().splitlines():
            info = gateway.client.rollout(json.loads(line)["id"])
            used.setdefault(run, []).append(info.metadata["slot"])
            assert (info.version, info.turns) == (0, 1)
    assert sorted(used["once"]) == sorted(used["again"]) == [0, 0, 1, 1]
    found = [eval_log.read(tmp_path / run / "run") for run in ("once", "again")]
    assert [one["name"] for one in found[0]] == ["base", "start"]
    assert found[0][0]["rewards"] == found[1][0]["rewards"]


def test_every_evaluation_is_a_point_of_a_curve_the_bases_one_and_the_last_one_too(
    serve: Callable[[Any], GatewayProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRACKIO_DIR", raising=False)
    gateway = serve([r"\boxed{2}"])
    settings = evaluator(gateway, tmp_path, sets(tmp_path)).settings
    (tmp_path / "evaluator.yaml").write_text(yaml.safe_dump(settings.model_dump(mode="json", exclude_none=True)))
    code = "import sys; from turngate.trainer.evaluator import eval_command; sys.exit(eval_command(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "--config", str(tmp_path / "evaluator.yaml"), "--once"]
    subprocess.run(command, capture_output=True, check=True)
    publish(gateway, adapter(tmp_path, "seven"), 7)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    records = json.loads(done.stdout)
    assert [one["name"] for one in records] == ["base", "start", "step-7"]
    with sqlite3.connect(tmp_path / "run" / "trackio" / "run.db") as store:
        rows = store.execute("SELECT run_name, step, metrics, run_id FROM metrics ORDER BY id").fetchall()
    assert [(name, step) for name, step, *_ in rows] == [("evaluation-base", 0), ("evaluation", 0), ("evaluation", 7)]
    assert [json.loads(text) for _, _, text, _ in rows] == [eval_log.eval_metrics(one) for one in records]
    assert rows[1][3] == rows[2][3], "an evaluator started again goes on in the same run"


def test_an_interrupted_evaluation_goes_on(serve: Callable[[Any], GatewayProcess], tmp_path: Path) -> None:
    gateway = serve([r"\boxed{2}"])
    tasks = sets(tmp_path)
    first = evaluator(gateway, tmp_path, tasks)
    first.stop()
    asyncio.run(first.follow(once=True))
    assert eval_log.read(tmp_path / "run") == []
    asyncio.run(evaluator(gateway, tmp_path, tasks).follow(once=True))
    assert [one["name"] for one in eval_log.read(tmp_path / "run")] == ["base", "start"]


def test_the_start_is_held_while_training_goes_on(serve: Callable[[Any], GatewayProcess], tmp_path: Path) -> None:
    gateway = serve([r"\boxed{2}"])
    following = evaluator(gateway, tmp_path, sets(tmp_path))

    async def train_meanwhile() -> None:
        looking = asyncio.create_task(following._look_for_start())
        await asyncio.to_thread(publish, gateway, adapter(tmp_path, "warm"), 0)
        await looking
        await asyncio.to_thread(publish, gateway, adapter(tmp_path, "one"), 1)
        await following.follow(once=True)

    asyncio.run(train_meanwhile())
    found = [(one["name"], one["version"]) for one in eval_log.read(tmp_path / "run")]
    assert found == [("base", 0), ("start", 1), ("step-1", 2)]
    assert [one.version for one in gateway.client.policy("policy").live] == [2]


@pytest.mark.parametrize("lost", [False, True])
def test_an_evaluator_started_again_evaluates_the_start_that_the_killed_one_held_unless_it_is_lost(
    serve: Callable[[Any], GatewayProcess], tmp_path: Path, lost: bool
) -> None:
    gateway = serve([r"\boxed{2}"])
    tasks = sets(tmp_path)
    publish(gateway, adapter(tmp_path, "warm"), 0)
    killed = evaluator(gateway, tmp_path, tasks)
    asyncio.run(killed._look_for_start())
    publish(gateway, adapter(tmp_path, "one"), 1)
    again = killed if lost else evaluator(gateway, tmp_path, tasks)
    if lost:
        (held,) = gateway.client.open_rollouts()
        gateway.client.finish_rollout(held.id, wire.FinishRollout(outcome="cancelled", cause="version_retired"))
    asyncio.run(again.follow(once=True))
    found = [one["name"] for one in eval_log.read(tmp_path / "run")]
    assert found == (["base", "step-1"] if lost else ["base", "start", "step-1"])
    assert gateway.client.open_rollouts() == []


def test_only_an_evaluation_may_choose_its_version_and_only_a_live_one(
    serve: Callable[[Any], GatewayProcess], tmp_path: Path
) -> None:
    gateway = serve(["Fine."])
    publish(gateway, adapter(tmp_path, "one"), 1)
    publish(gateway, adapter(tmp_path, "two"), 2)
    for wrong in ({"training": True, "version": 2}, {"training": False, "version": 1}):
        with pytest.raises(GatewayError, match="version"):
            gateway.session(**wrong)
    assert gateway.session(training=False, version=0)[0].version == 0


def test_answers_are_counted(serve: Callable[[Any], GatewayProcess]) -> None:
    call = {"tool_calls": [{"name": "bash", "arguments": {"command": "ls"}}]}
    gateway = serve([call])
    created, client = gateway.session(training=False)
    tool = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}
    said = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "tools": [tool]}
    client.chat.completions.create(**said)  # type: ignore[call-overload]
    client.chat.completions.create(model="m", max_tokens=3, messages=[{"role": "user", "content": "Ho"}])
    found = gateway.client.answers(created.id)
    assert (found.turns, found.tool_calls, found.truncated, found.empty) == (2, 1, 1, 0)


def test_settings_without_tasks_are_refused_with_the_key(tmp_path: Path) -> None:
    (tmp_path / "eval.yaml").write_text("output: here\neval: {}\nrun: {}\n")
    with pytest.raises(ValueError, match=r"eval\.tasks"):
        read_settings(tmp_path / "eval.yaml", [])
