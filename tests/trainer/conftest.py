"""Fixtures of the trainer's tests: a real tokenizer, a tiny random model beside it, a stub gateway, a launcher."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml

from tests.trainer.launching import Launch
from tests.trainer.stub_gateway import StubGateway
from turngate.trainer.tracking import FOLDER_VARIABLE

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")


@pytest.fixture(autouse=True)
def _no_trackio_folder_of_another_test() -> Iterator[None]:
    """Training in this process says in its environment where trackio writes; what is started later would inherit it."""
    os.environ.pop(FOLDER_VARIABLE, None)
    yield
    os.environ.pop(FOLDER_VARIABLE, None)


@pytest.fixture(scope="session")
def tiny_model(model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 2 layers and 64 hidden units with SmolLM2's tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(model_dir("smollm2-135m") / name, folder / name)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def gateway(tiny_model: Path) -> Iterator[StubGateway]:
    """A stub gateway that samples its groups from the tiny model and whatever adapter was last published."""
    with StubGateway(tiny_model) as stub:
        yield stub


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """A launcher of fake parts, in a folder with a configuration `fake.yaml`."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    config = {"name": "fake", "model": "model", "run": {}, "train": {"steps": 3}, "stop_grace_s": 1.0}
    (tmp_path / "fake.yaml").write_text(yaml.safe_dump(config))
    launch = Launch(tmp_path)
    yield launch
    for pid in launch.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if launch.process is not None:
        launch.process.communicate()
