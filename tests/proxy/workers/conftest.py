"""Gateways of two workers, shared by the tests of a module: starting three processes is what these tests cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fake_engine.runner import FakeEngine
from tests.fake_engine.settings import FakeSettings
from tests.gateway_process import GatewayProcess
from tests.proxy.conftest import Gate
from turngate.proxy import wire


def gate_with(
    options: tuple[str, ...], model_dir: Callable[[str], Path], factory: pytest.TempPathFactory
) -> Iterator[Gate]:
    """A gateway with these options before a fake engine."""
    with (
        FakeEngine(model_dir("qwen-coder-0.5b"), ["Hello."]) as fake,
        GatewayProcess(fake.url, factory.mktemp("gate") / "store", *options) as gateway,
    ):
        yield Gate(fake, gateway)


@pytest.fixture(scope="module")
def shared_two(model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    """Two workers, each on its port."""
    yield from gate_with(("--workers", "2"), model_dir, tmp_path_factory)


@pytest.fixture(scope="module")
def shared_front(model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    """Two workers behind the main port."""
    options = ("--workers", "2", "--front", "true", "--reattach-s", "0", "--max-body-bytes", "20000")
    yield from gate_with(options, model_dir, tmp_path_factory)


@pytest.fixture
def two(shared_two: Gate) -> Iterator[Gate]:
    """`shared_two` without open rollouts, before and after."""
    yield shared_two
    cleared(shared_two)


@pytest.fixture
def front(shared_front: Gate) -> Iterator[Gate]:
    """`shared_front` without open rollouts, before and after."""
    yield shared_front
    cleared(shared_front)


def cleared(gate: Gate) -> None:
    """End what a test left open; the engine is quick again."""
    gate.fake.engine.settings = FakeSettings()
    for rollout in gate.gateway.client.open_rollouts():
        over = wire.FinishRollout(outcome="cancelled", cause="test_over")
        gate.gateway.client.finish_rollout(rollout.id, over)
