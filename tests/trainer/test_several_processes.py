"""One run over two processes (DDP): the same weights as in one; the gateway is told everything once."""

from __future__ import annotations

import dataclasses
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.make import group, rollout, wire_row
from tests.trainer.stub_gateway import KEY, StubGateway
from turngate.proxy import wire
from turngate.trainer.progress import read_metrics
from turngate.trainer.settings import ADMIN_KEY_VARIABLE, TrainSettings
from turngate.trainer.train import train

MAIN = "import sys; from turngate.trainer.train import train_command; sys.exit(train_command(sys.argv[1:]))"


def near_uniform(number: int) -> wire.LeasedGroup:
    """A group of three rows recorded near what a random model gives: ratios near 1, so gradients are no rounding."""
    made = []
    for index, reward in enumerate((0.0, 1.0, 0.3)):
        name, first = f"g{number}-{index}", 50 + 9 * number + index
        row = wire_row(name, [1, 2, 3 + number], range(first, first + 3 + number))
        row = dataclasses.replace(row, logprobs=np.where(row.mask, -10.8 + 0.1 * index, 0.0).astype(np.float32))
        made.append(rollout(name, reward, row))
    return group(f"g{number}", *made)


def settings_for(stub: StubGateway, model: Path, output: Path, steps: int) -> dict[str, Any]:
    return {
        "model": str(model),
        "gateway": stub.url,
        "output": str(output),
        "steps": steps,
        "groups_per_step": 2,
        "token_budget": 20,
        "learning_rate": 1e-2,
        "device": "cpu",
        "threads": 1,
        "lora_targets": ["q_proj", "v_proj"],
        "report_to": [],
    }


def in_two_processes(settings: dict[str, Any]) -> None:
    """`turngate train`, started by torchrun."""
    output = Path(settings["output"])
    output.mkdir(exist_ok=True)
    (output / "run.yaml").write_text(json.dumps({"train": settings}))
    (output / "main.py").write_text(MAIN)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(port)]
    words += [str(output / "main.py"), "--config", str(output / "run.yaml")]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-6000:]


def trained(model: Path, output: Path, start: Callable[[dict[str, Any]], Any]) -> StubGateway:
    """Two steps, then a third after a resume: what the gateway saw."""
    with StubGateway(None) as stub:
        stub.prepared = [near_uniform(number) for number in range(6)]
        for steps in (2, 3):
            start(settings_for(stub, model, output, steps))
        return stub


def last_weights(stub: StubGateway) -> dict[str, torch.Tensor]:
    return load_file(Path(stub.versions[-1].path) / "adapter_model.safetensors")


@pytest.mark.long
def test_two_processes_end_with_the_weights_of_one_and_speak_to_the_gateway_as_one(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ADMIN_KEY_VARIABLE, KEY)
    alone = last_weights(
        trained(tiny_model, tmp_path / "one", lambda s: train(TrainSettings.model_validate(s), threading.Event()))
    )
    stub = trained(tiny_model, tmp_path / "two", in_two_processes)
    assert [entry for entry in stub.history if entry[1] == "trained"] == [
        (f"g{number}", "trained", number // 2 + 1) for number in range(6)
    ]
    assert stub.resumed == [0, 2], "each start told the gateway once, and the second went on from the checkpoint"
    assert stub.durable_steps == [1, 2, 2, 3]
    assert [info.step for info in stub.versions] == [1, 2, 3]
    both, lines = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    for name in ("grad_norm", "loss", "ratio_mean", "kl", "entropy", "tokens", "clip_fraction"):
        mine = [line[name] for line in lines]
        assert mine == pytest.approx([line[name] for line in both], rel=1e-3, abs=1e-7), f"{name} of the whole step"
    assert [(line["step"], line["groups"], line["rows"]) for line in lines] == [(1, 2, 6), (2, 2, 6), (3, 2, 6)]
    assert len(stub.acks["g0"][1].rows) == 3, "the rows' statistics come from both processes"
    weights = last_weights(stub)
    for name, tensor in alone.items():
        torch.testing.assert_close(weights[name], tensor, atol=2e-4, rtol=1e-2)
    assert max(float(tensor.abs().max()) for name, tensor in alone.items() if "lora_B" in name) > 1e-2
