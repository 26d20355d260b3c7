"""Fixtures of the harness tests: an installed pi, a tokenizer for the fake engine, stages to run rollouts on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import FindModel
from tests.fake_engine.runner import FakeEngine
from tests.gateway_process import GatewayProcess
from turngate.harnesses.bubblewrap import Bubblewrap
from turngate.harnesses.install import Installed, install
from turngate.harnesses.patient import PatientGateway
from turngate.harnesses.pi import Pi
from turngate.harnesses.registry import get_harness
from turngate.harnesses.rollout import Stage
from turngate.harnesses.settings import RunSettings
from turngate.harnesses.workspace import Scratch
from turngate.tasks.harbor import Task, load_task

StageMaker = Callable[..., Stage]
TaskMaker = Callable[..., Task]


@pytest.fixture(scope="session")
def pi_installed() -> Installed:
    """pi at its pinned version, in the project's cache."""
    return install(Pi())


@pytest.fixture
def serve(model_dir: FindModel, tmp_path: Path) -> Iterator[Callable[..., GatewayProcess]]:
    """`serve(script)`: a gateway in front of a fake engine that answers from `script`, with Qwen2.5's tokenizer."""
    with ExitStack() as stack:

        def start(script: Any, **options: Any) -> GatewayProcess:
            folder = model_dir("qwen-coder-0.5b")
            engine = stack.enter_context(FakeEngine(folder, script=script, **options))
            return stack.enter_context(GatewayProcess(engine.url, tmp_path / "store", "--tokenizer", str(folder)))

        yield start


@pytest.fixture
def make_task(tmp_path: Path) -> TaskMaker:
    """`make_task(test_sh, prompts=…, environment=…, toml=…)`: a Harbor task directory, loaded."""
    numbers = itertools.count()

    def make(
        test_sh: str,
        *,
        prompts: tuple[str, ...] = ("Do it.",),
        environment: Mapping[str, str] | None = None,
        toml: str = "",
    ) -> Task:
        folder = tmp_path / "tasks" / f"task{next(numbers)}"
        names = [f"prompt{number}.md" for number in range(len(prompts))]
        files = dict(zip(names, prompts, strict=True))
        files |= {f"environment/{name}": text for name, text in (environment or {}).items()}
        files["tests/test.sh"] = test_sh
        files["task.toml"] = f'version = "1.0"\n[metadata.turngate]\nprompts = {names}\n{toml}'
        for name, text in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return load_task(folder)

    return make


@pytest.fixture
def make_stage(tmp_path: Path) -> Iterator[StageMaker]:
    """`make_stage(gateway, **settings)`: what rollouts on that gateway share, in bubblewrap (default: pi)."""
    with ExitStack() as stack:
        scratch = stack.enter_context(Scratch(tmp_path / "scratch"))

        def make(gateway: GatewayProcess, **settings: Any) -> Stage:
            chosen = RunSettings(gateway=gateway.url, **settings)
            patient = PatientGateway(gateway.client, chosen.gateway_patience_s)
            harness = get_harness(chosen.harness)
            return Stage(chosen, harness, install(harness), Bubblewrap(), patient, scratch, tmp_path / "faults")

        yield make
