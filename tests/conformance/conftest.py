"""Which target the suite runs against, and on which engine; and what came of it, as a file.

`TURNGATE_CONFORMANCE_TARGET`: `turngate` (the default), `vllm` or `openenv`. `TURNGATE_CONFORMANCE_ENGINE`: the URL of
a vLLM server, see `docs/conformance.md`; without it the tests' fake engine, with which only `turngate` is worth a run.
`TURNGATE_CONFORMANCE_RESULTS`: a JSON file to write the outcomes to.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.engines import Engine, RealEngine, ScriptedEngine
from tests.conformance.targets import TARGETS, NotOffered, Target
from tests.conformance.wanted import Says

RESULTS = pytest.StashKey[dict[str, Any]]()


@pytest.fixture(scope="session")
def engine(model_dir: Callable[[str], Path]) -> Iterator[Engine]:
    """The engine behind the target."""
    url = os.environ.get("TURNGATE_CONFORMANCE_ENGINE")
    tokenizer = model_dir("qwen-coder-0.5b")
    with RealEngine(url, tokenizer) if url else ScriptedEngine(tokenizer) as made:
        yield made


@pytest.fixture(scope="session")
def target(engine: Engine, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Target]:
    """The target, started."""
    kind = TARGETS[os.environ.get("TURNGATE_CONFORMANCE_TARGET", "turngate")]
    with kind(engine, tmp_path_factory.mktemp("target")) as made:
        about = pytestconfig.stash.setdefault(RESULTS, {"outcomes": {}})
        about |= {"target": made.name, "version": made.version, "engine": engine.name}
        yield made


@pytest.fixture(scope="session")
def policy(engine: Engine, model_dir: Callable[[str], Path]) -> Says:
    """The model, as tests steer it."""
    return Says(engine, model_dir("qwen-coder-0.5b"))


@pytest.fixture
def says(engine: Engine, policy: Says) -> Iterator[Says]:
    """`says([...])`: what the model says in this test. Nothing of it is left to the next one."""
    policy([])
    yield policy
    engine.relay.release()
    engine.relay.lose_prompt_ids = False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """What a target does not offer is no failure, and is told as such."""
    report = yield
    name = str(getattr(item, "originalname", item.name)).removeprefix("test_")
    about = item.config.stash.setdefault(RESULTS, {"outcomes": {}})
    outcomes = about["outcomes"].setdefault(name, [])
    if call.excinfo is None:
        if call.when == "call":
            outcomes.append(["holds", ""])
        return report
    error = call.excinfo.value
    if isinstance(error, NotOffered):
        report.outcome, report.longrepr = "passed", None
        outcomes.append(["not offered", str(error)])
    else:
        outcomes.append(["fails", _words(error)])
    return report


def _words(error: BaseException) -> str:
    """The first line of what went wrong, as the test put it."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].removeprefix("AssertionError: ")[:200]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the outcomes where that was asked for."""
    path = os.environ.get("TURNGATE_CONFORMANCE_RESULTS")
    if path and RESULTS in session.config.stash:
        Path(path).write_text(json.dumps(session.config.stash[RESULTS], indent=1, sort_keys=True))
