"""The example trainer is short, and trains: leased groups become an adapter that new rollouts are served with."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file

from tests.fake_engine.runner import FakeEngine
from tests.gateway_process import GatewayProcess
from tests.proxy.test_faults import BODY
from turngate.proxy import wire
from turngate.proxy.client import GatewayClient
from turngate.proxy.verify import verify_store

PROGRAM = Path(__file__).resolve().parent.parent / "examples/minimal_trainer.py"


@pytest.fixture
def gateway(model_dir: Callable[[str], Path], tmp_path: Path) -> Iterator[GatewayProcess]:
    with ExitStack() as stack:
        fake = stack.enter_context(FakeEngine(model_dir("smollm2-135m"), ["The answer is four.", "It is five."]))
        yield stack.enter_context(GatewayProcess(fake.url, tmp_path / "store"))


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A random Llama of 2 layers with as many tokens as the engine's tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=49152, **sizes)).save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def play(gateway: GatewayProcess, group: str, rewards: list[float]) -> None:
    """A group of rollouts of two turns, as any runner would make it."""
    for reward in rewards:
        new = {"group": group, "group_size": len(rewards)}
        created, _ = gateway.session(**new)
        first = httpx.post(f"{created.base_url}/chat/completions", json=BODY).json()["choices"][0]["message"]
        messages = [*BODY["messages"], first, {"role": "user", "content": "And then?"}]
        assert httpx.post(f"{created.base_url}/chat/completions", json={"messages": messages}).status_code == 200
        gateway.client.finish_rollout(created.id, wire.FinishRollout(reward=reward))


def train(gateway: GatewayProcess, model: Path, out: Path, *options: str) -> str:
    command = [sys.executable, str(PROGRAM), "--gateway", gateway.url, "--model", str(model), "--out", str(out)]
    command += ["--key-file", str(gateway.store / "admin.key"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_has_at_most_80_lines_and_no_trl() -> None:
    text = PROGRAM.read_text()
    assert len(text.splitlines()) <= 80
    assert "trl" not in text


def test_it_leases_trains_publishes_and_acknowledges(gateway: GatewayProcess, tiny: Path, tmp_path: Path) -> None:
    play(gateway, "good", [0.0, 1.0])
    play(gateway, "flat", [1.0, 1.0])
    play(gateway, "more", [1.0, 0.0, 0.5])
    said = train(gateway, tiny, tmp_path / "out", "--steps", "2", "--groups", "2")
    assert "step 2: " in said
    assert "version 2 is live" in said

    weights = load_file(tmp_path / "out/step-2/adapter_model.safetensors")
    assert any(value.abs().sum() > 0 for name, value in weights.items() if "lora_B" in name)
    status = gateway.client.status()
    assert {state: count for state, count in status.groups.items() if count} == {"trained": 2, "zero_variance": 1}
    created, _ = gateway.session()
    assert created.version == 2
    adapters = gateway.client.policy("policy").live
    assert [(one.version, one.step, Path(one.path).name) for one in adapters][-1] == (2, 2, "step-2")
    gateway.stop()
    report = verify_store(gateway.store)
    assert report.ok, json.dumps(report.as_json())
    assert report.trained_tokens > 0


def test_a_second_run_takes_over_what_the_first_had_leased(gateway: GatewayProcess, tiny: Path, tmp_path: Path) -> None:
    play(gateway, "good", [0.0, 1.0])
    with GatewayClient(gateway.url, (gateway.store / "admin.key").read_text().strip()) as dead:
        assert dead.lease(wire.NewLease(policy="policy", ttl_s=3600)).groups
    train(gateway, tiny, tmp_path / "out", "--steps", "1")
    assert gateway.client.status().groups["trained"] == 1
