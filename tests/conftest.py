"""Fixtures of all tests: models by name, and real vLLM servers shared by a whole session.

`TURNGATE_TEST_MODELS` names a folder with models in it; `TURNGATE_TEST_ENGINE_URL` and `TURNGATE_TEST_QWEN_URL` name
servers that run already, so that nothing is started.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings

from tests.engines import RealEngine, real_engine, vllm_server

FindModel = Callable[[str], pathlib.Path]

settings.register_profile("no clocks", deadline=None)  # a busy machine is no failure
settings.load_profile("no clocks")


def find_model(name: str) -> pathlib.Path:
    """The folder of a small model, fetched and made on first use."""
    folder = os.environ.get("TURNGATE_TEST_MODELS")
    if folder:
        return pathlib.Path(folder) / name
    from turngate.trainer.models import resolve_model

    return pathlib.Path(resolve_model(name))


@pytest.fixture(scope="session")
def model_dir() -> FindModel:
    """`model_dir("smollm2-135m")` is that model's folder."""
    return find_model


@pytest.fixture(scope="session")
def smollm_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEngine]:
    """The real vLLM with SmolLM2-135M-Instruct, without a tool parser."""
    url = os.environ.get("TURNGATE_TEST_ENGINE_URL")
    if url:
        yield real_engine(url)
        return
    log = tmp_path_factory.mktemp("vllm") / "smollm.log"
    with vllm_server(find_model("smollm2-135m"), log) as engine:
        yield engine


@pytest.fixture(scope="session")
def qwen_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEngine]:
    """The real vLLM with Qwen2.5-Coder-0.5B-Instruct and the hermes tool parser."""
    url = os.environ.get("TURNGATE_TEST_QWEN_URL")
    if url:
        yield real_engine(url)
        return
    log = tmp_path_factory.mktemp("vllm") / "qwen.log"
    parser = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with vllm_server(find_model("qwen-coder-0.5b"), log, *parser) as engine:
        yield engine


@pytest.fixture(scope="session")
def vllm_url(smollm_engine: RealEngine) -> str:
    """URL of the real vLLM with the smallest model."""
    return smollm_engine.url
