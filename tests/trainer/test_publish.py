"""Adapters appear whole, are never written twice, and are checked to have an effect."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file

from tests.trainer.stub_gateway import KEY, POLICY, StubGateway
from turngate.proxy.client import GatewayClient
from turngate.trainer.errors import NotFinite, PublishFailed
from turngate.trainer.publish import canary, prune_adapters, publish, write_adapter

NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def write(folder: Path) -> Path:
    return write_adapter(folder, {NAME: torch.ones(2, 3)}, LoraConfig(r=2, target_modules=["q_proj"]))


def test_an_adapter_folder_has_what_the_engine_loads_and_no_draft_beside_it(tmp_path: Path) -> None:
    folder = write(tmp_path / "step-000001-0")
    assert folder.is_absolute()
    assert torch.equal(load_file(folder / "adapter_model.safetensors")[NAME], torch.ones(2, 3))
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["inference_mode"], config["peft_type"]) == (2, True, "LORA")
    assert [f.name for f in tmp_path.iterdir()] == ["step-000001-0"]


def test_a_published_folder_is_never_written_again(tmp_path: Path) -> None:
    write(tmp_path / "step-000001-0")
    with pytest.raises(OSError, match="step-000001-0"):
        write(tmp_path / "step-000001-0")


@pytest.mark.parametrize("spoilt", [float("nan"), float("inf")])
def test_weights_that_are_not_numbers_are_never_written(tmp_path: Path, spoilt: float) -> None:
    weights = {NAME: torch.ones(2, 3), "other": torch.tensor([0.0, spoilt])}
    with pytest.raises(NotFinite, match=r"1 of the adapter's 2 tensors are not finite \(other\).*checkpoint"):
        write_adapter(tmp_path / "step-000001-0", weights, LoraConfig(r=2))
    assert list(tmp_path.iterdir()) == []


def test_a_draft_left_by_a_kill_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / ".step-000001-0.tmp").mkdir()
    (tmp_path / ".step-000001-0.tmp" / "junk").write_text("x")
    assert not (write(tmp_path / "step-000001-0") / "junk").exists()


def test_pruning_spares_the_newest_and_the_live(tmp_path: Path) -> None:
    for at in range(5):
        os.utime(write(tmp_path / f"step-00000{at}-0"), ns=(at, at))
    live = str((tmp_path / "step-000000-0").resolve())
    prune_adapters(tmp_path, 2, [live])
    assert sorted(f.name for f in tmp_path.iterdir()) == ["step-000000-0", "step-000003-0", "step-000004-0"]


def test_a_version_that_did_not_go_live_is_a_failure_with_its_cause(tmp_path: Path) -> None:
    with StubGateway(None) as stub, GatewayClient(stub.url, KEY) as client:
        stub.fail_publications = 1
        folder = write(tmp_path / "a")
        with pytest.raises(PublishFailed, match="no room"):
            publish(client, POLICY, folder, 1)
        assert publish(client, POLICY, folder, 1).version == 1


@contextmanager
def engine(logprobs: dict[str, dict[int, float]]) -> Iterator[str]:
    """A server of `/inference/v1/generate` that gives each model's likeliest next tokens."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            top = [{"token_id": t, "logprob": p} for t, p in logprobs.get(asked["model"], {}).items()]
            data = json.dumps({"choices": [{"logprobs": {"content": [{"top_logprobs": top}]}}]}).encode()
            self.send_response(200 if top else 404)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_the_canary_measures_what_the_adapter_changes() -> None:
    with engine({"base": {5: -1.0, 6: -2.0}, "v1": {5: -1.25, 6: -1.9}, "dead": {5: -1.0, 6: -2.0}}) as url:
        assert canary(url, "v1", "base", [1, 2]) == pytest.approx(0.25)
        assert canary(url, "dead", "base", [1, 2]) == 0.0
        with pytest.raises(PublishFailed, match="absent"):
            canary(url, "absent", "base", [1, 2])
