"""Fixtures of the gateway's tests: a fake engine with Qwen2.5's tokenizer and template, a gateway process before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.fake_engine.runner import FakeEngine
from tests.fake_engine.script import Script
from tests.gateway_process import GatewayProcess

StartFake = Callable[..., FakeEngine]
StartGateway = Callable[..., GatewayProcess]


@pytest.fixture
def started() -> Iterator[ExitStack]:
    """What a test started, stopped in reverse order."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def start_fake(started: ExitStack, model_dir: Callable[[str], Path]) -> StartFake:
    """`start_fake(script, ...)`: a fake engine."""

    def start(script: Any = None, **options: Any) -> FakeEngine:
        return started.enter_context(FakeEngine(model_dir("qwen-coder-0.5b"), script, **options))

    return start


@pytest.fixture
def start_gateway(started: ExitStack, tmp_path: Path) -> StartGateway:
    """`start_gateway(engine_url, *options)`: a gateway process with a new store."""

    def start(engine_url: str, *options: str, store: str = "store") -> GatewayProcess:
        return started.enter_context(GatewayProcess(engine_url, tmp_path / store, *options))

    return start


@dataclass(frozen=True)
class Gate:
    """A gateway before a fake engine, shared by the tests of a module; each test says what the engine answers."""

    fake: FakeEngine
    gateway: GatewayProcess

    def says(self, script: Any) -> GatewayProcess:
        """Set the engine's answers and forget what it saw."""
        self.fake.fail(None)
        self.fake.engine.script = Script.of(script)
        self.fake.engine.requests.clear()
        return self.gateway


@pytest.fixture(scope="module")
def gate(model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    """The shared gateway of a module."""
    with (
        FakeEngine(model_dir("qwen-coder-0.5b"), ["Hello."]) as fake,
        GatewayProcess(fake.url, tmp_path_factory.mktemp("gate") / "store") as gateway,
    ):
        yield Gate(fake, gateway)
