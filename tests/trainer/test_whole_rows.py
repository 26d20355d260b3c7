"""Models whose layers are not all attention train with whole rows instead of a packed tree."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainer.make import rows_of, simple_group
from tests.trainer.stub_gateway import KEY, StubGateway
from tests.trainer.test_training import make_trainer, near_on_policy, settings_for
from turngate.proxy.client import GatewayClient
from turngate.trainer import trl_names
from turngate.trainer.planner import mask_stale, plan_step
from turngate.trainer.settings import ADMIN_KEY_VARIABLE
from turngate.trainer.train import train
from turngate.trainer.whole_rows import UNTRAINED, Padded, RowBin

SIZES = {"vocab_size": 49152, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def _lfm2() -> Any:
    from transformers import Lfm2Config, Lfm2ForCausalLM

    kinds = ["conv", "conv", "full_attention", "conv"]
    return Lfm2ForCausalLM(Lfm2Config(**SIZES, **HEADS, layer_types=kinds, bos_token_id=1, eos_token_id=2))


def _qwen35() -> Any:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    linear = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2}
    config = Qwen3_5TextConfig(
        **SIZES, **HEADS, **linear, linear_num_value_heads=4, head_dim=16, bos_token_id=1, eos_token_id=2
    )
    return Qwen3_5ForCausalLM(config)


FAMILIES: dict[str, tuple[Callable[[], Any], str]] = {"lfm2": (_lfm2, "conv"), "qwen3.5": (_qwen35, "linear_attention")}


@pytest.fixture(params=list(FAMILIES), scope="module")
def mixed_model(
    request: pytest.FixtureRequest, model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """A tiny random model of the family, and its kind of layer that is no attention."""
    make, kind = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp("mixed")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(model_dir("smollm2-135m") / name, folder / name)
    torch.manual_seed(0)
    make().save_pretrained(folder)
    return folder, kind


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADMIN_KEY_VARIABLE, KEY)


def test_padding_stands_after_a_row_and_each_term_points_at_the_position_before_its_token() -> None:
    groups = [simple_group("a", [0.0, 1.0], tokens=2), simple_group("b", [0.0, 1.0], tokens=4)]
    rows = [mask_stale(row, version=0, max_staleness=4) for row in rows_of(*groups)]
    padded = Padded.of(rows, torch.device("cpu"))
    t = padded.tensors
    assert t["input_ids"].shape == (4, 7)
    assert t["attention_mask"].sum(1).tolist() == [5, 5, 7, 7]
    assert padded.forwarded_tokens == 28
    assert (t["shift_labels"] != UNTRAINED).sum().item() == len(t["token_index"]) == 12
    targets = t["shift_labels"].flatten()[t["token_index"]]
    assert targets.tolist() == [int(i) for row in rows for i in row.row.ids[row.mask]]
    assert t["old_log_probs"].tolist() == [float(i) for row in rows for i in row.row.logprobs[row.mask]]
    assert t["segment_id"].tolist() == [0] * 2 + [1] * 2 + [2] * 4 + [3] * 4


def test_a_bin_counts_padding() -> None:
    rows = [rows_of(simple_group("a", [0.0, 1.0], tokens=tokens))[0] for tokens in (2, 7)]
    short, long = (mask_stale(row, version=0, max_staleness=4) for row in rows)
    one = RowBin(20)
    one.add(long)
    assert one.fits(short)
    one.add(short)
    assert not one.fits(short)


def test_an_attention_model_keeps_its_tree(tiny_model: Path) -> None:
    assert trl_names.other_layers(str(tiny_model)) == []


def test_such_a_model_trains_and_agrees_with_what_was_sampled(mixed_model: tuple[Path, str], tmp_path: Path) -> None:
    model, kind = mixed_model
    assert trl_names.other_layers(str(model)) == [kind]
    with StubGateway(model) as gateway:
        changed = {"steps": 3, "groups_per_step": 1, "learning_rate": 5e-2, "kl_coefficient": 0.1}
        assert train(settings_for(gateway, model, tmp_path, **changed), threading.Event()) == 0
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["version"] for line in steps] == [1, 2, 3]
    for line in steps:
        assert line["exact/ratio_mean"] == pytest.approx(1.0, abs=1e-4)
        assert line["exact/max_abs_dlogp"] < 1e-4
    assert steps[0]["canary/trainer_max_abs_dlogp"] > 1e-3
    assert steps[-1]["kl_base"] > 1e-5


def test_its_gradient_does_not_depend_on_what_is_padded_together(mixed_model: tuple[Path, str], tmp_path: Path) -> None:
    model, kind = mixed_model
    with StubGateway(model) as gateway, GatewayClient(gateway.url, KEY) as client:
        trainer = make_trainer(gateway, model, tmp_path, client)
        assert kind in trainer.attention_refused["tree"]
        assert trainer.model.config.get_text_config().layer_types, "TRL's check saw none; the model has them again"
        trainer.get_train_dataloader()
        for name, parameter in trainer.model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(3))
        groups = [near_on_policy(simple_group(f"g{i}", [0.0, 1.0, 0.3], tokens=3 + 4 * i)) for i in range(2)]

        def gradient(budget: int) -> tuple[int, torch.Tensor]:
            plan = plan_step(groups, step=1, version=0, max_staleness=4, new_bin=lambda: RowBin(budget))
            trainer.model.zero_grad()
            trainer.training_step(trainer.model, {"plan": plan}, None)
            grads = [p.grad.flatten() for p in trainer.model.parameters() if p.requires_grad and p.grad is not None]
            return len(plan.micro), torch.cat(grads)

        together, whole = gradient(1000)
        alone, found = gradient(1)
        assert (together, alone) == (1, 6)
        assert float(np.abs(whole.numpy()).max()) > 1e-5
        torch.testing.assert_close(found, whole, atol=2e-5 * float(whole.abs().max()), rtol=1e-3)
