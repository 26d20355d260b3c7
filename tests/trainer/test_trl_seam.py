"""The contract with TRL: every name used is listed here, for the one version that is pinned."""

from __future__ import annotations

import ast
import dataclasses
import importlib.metadata
import inspect
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl import import_utils

import turngate.trainer
from turngate.trainer import trl_names, trl_seam
from turngate.trainer.attention import SdpaTree, choose
from turngate.trainer.lease_source import LeaseSource
from turngate.trainer.trl_names import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

FOLDER = Path(turngate.trainer.__path__[0])
NAMES = ast.parse((FOLDER / "trl_names.py").read_text())
SEAM = ast.parse((FOLDER / "trl_seam.py").read_text())

IMPORTED = {"trl", "import_utils", "AsyncGRPOConfig", "AsyncGRPOTrainer", "async_grpo_trainer", "packing"} | {
    "SFTConfig",
    "SFTTrainer",
}
ATTRIBUTES = {
    "trl": {"__version__"},
    "packing": {"TREE_ATTENTION", "TreeRow", "_flash_attn", "tree_attention"},
    "import_utils": {"is_vllm_available"},
    "async_grpo_trainer": {"create_model_from_path", "get_peak_flops_per_device"},
}
OVERRIDDEN = {
    "__init__",
    "_log_step_metrics",
    "_save_checkpoint",
    "_sync_weight",
    "compute_loss",
    "get_train_dataloader",
    "log",
    "training_step",
}
WORKER = {"rollout_buffer", "metrics_queue", "start", "stop", "update_model_version", "check_health"}
TRANSFER = {"init_weight_transfer", "pause", "send_weights", "resume", "destroy"}
PACKED = {
    "input_ids",
    "position_ids",
    "shift_labels",
    "token_index",
    "old_log_probs",
    "advantages",
    "segment_id",
    "tree_kv_index",
    "tree_cu_seqlens_q",
    "tree_cu_seqlens_k",
}


def test_the_version_is_pinned_exactly_and_installed() -> None:
    project = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text())["project"]
    assert f"trl=={trl_names.TRL_VERSION}" in project["optional-dependencies"]["train"]
    assert importlib.metadata.version("trl") == trl_names.TRL_VERSION
    trl_names.check_version()


def test_the_trainer_does_not_load_vllm() -> None:
    code = "import sys, turngate.trainer.trl_seam; sys.exit('vllm' in sys.modules)"
    environment = dict(os.environ, TRL_EXPERIMENTAL_SILENCE="1")
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


def test_only_the_seam_imports_trl_and_only_the_seam_uses_its_names() -> None:
    users = {f.name for f in FOLDER.rglob("*.py") if "turngate.trainer.trl_names import" in f.read_text()}
    assert users == {"trl_seam.py", "sft_seam.py"}
    knowing = set()
    for file in FOLDER.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if any(name.split(".")[0] == "trl" for name in names):
                knowing.add(file.name)
    assert knowing == {"trl_names.py"}


def test_every_trl_name_in_the_seam_is_listed_and_exists() -> None:
    imported = set()
    for node in ast.walk(NAMES):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trl"):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names if alias.name == "trl"}
    assert imported == IMPORTED
    for module, listed in ATTRIBUTES.items():
        used = {
            node.attr
            for node in (*ast.walk(NAMES), *ast.walk(SEAM))
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == module
        }
        assert used == listed
    assert all(hasattr(packing, name) for name in ATTRIBUTES["packing"])
    assert hasattr(import_utils, "is_vllm_available")
    assert all(hasattr(async_grpo_trainer, name) for name in ATTRIBUTES["async_grpo_trainer"])


def test_the_methods_we_override_are_listed_and_still_called_by_trl() -> None:
    mine = {name for name, value in vars(trl_seam.GatewayTrainer).items() if inspect.isfunction(value)}
    assert {name for name in mine if hasattr(AsyncGRPOTrainer, name)} == OVERRIDDEN
    source = inspect.getsource(async_grpo_trainer)
    for call in (
        "StepIntervalCallback(self._sync_weight, self.args.weight_sync_steps)",
        "self._trainer._sync_weight()",
    ):
        assert call in source
    assert "StepIntervalCallback(self._log_step_metrics, 1)" in source


def test_the_arguments_we_set_are_fields_of_its_configuration() -> None:
    (function,) = (n for n in NAMES.body if isinstance(n, ast.FunctionDef) and n.name == "arguments")
    (call,) = (
        n for n in ast.walk(function) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "AsyncGRPOConfig"
    )
    given = {keyword.arg for keyword in call.keywords}
    assert given <= {field.name for field in dataclasses.fields(AsyncGRPOConfig)}


def test_the_lease_source_and_the_transfer_have_what_its_protocols_ask() -> None:
    def public(protocol: type) -> set[str]:
        return {n for n in {*vars(protocol), *protocol.__annotations__} if not n.startswith("_")}

    assert public(async_grpo_trainer.RolloutWorkerProtocol) == WORKER
    assert public(async_grpo_trainer.WeightTransferProtocol) == TRANSFER
    source = inspect.getsource(LeaseSource)
    assert all(f"def {name}" in source or f"self.{name}:" in source for name in WORKER)
    assert all(hasattr(trl_seam.NoTransfer, name) for name in TRANSFER)


def test_its_packing_gives_the_tensors_we_read() -> None:
    row = packing.TreeRow()
    import numpy as np

    row.add(
        {
            "input_ids": np.array([1, 2, 3]),
            "completion_mask": np.array([False, True, True]),
            "old_log_probs": np.array([0.0, -1.0, -2.0]),
            "advantage": 0.5,
            "group_id": "g",
        }
    )
    packed = row.pack()
    assert packed.keys() >= PACKED
    assert packed["old_log_probs"].tolist() == [-1.0, -2.0]


def varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    longest_q: int,
    longest_k: int,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """What FlashAttention's kernel of this name means, written out: causal from the lower right corner of each path."""
    assert causal
    assert window_size == (-1, -1)
    assert (longest_q, longest_k) == (int(cu_q.diff().max()), int(cu_k.diff().max()))
    out = torch.empty_like(query)
    for place in range(len(cu_q) - 1):
        q = query[cu_q[place] : cu_q[place + 1]]
        k, v = (
            x[cu_k[place] : cu_k[place + 1]].repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value)
        )
        seen = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        scores = torch.einsum("qhd,khd->hqk", q, k) * softmax_scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out[cu_q[place] : cu_q[place + 1]] = torch.einsum("hqk,khd->qhd", weights, v)
    return out


@pytest.mark.parametrize("loads", [True, False])
def test_the_flash_attention_kernel_is_chosen_where_it_loads_and_is_right(
    loads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernel() -> Any:
        if not loads:
            raise ImportError("no module named 'kernels'")
        return SimpleNamespace(flash_attn_varlen_func=varlen)

    monkeypatch.setattr(packing, "_flash_attn", kernel)
    wanted, where = [trl_seam._flash_attention, SdpaTree], {"device": torch.device("cpu"), "dtype": torch.bfloat16}
    chosen, refused = choose(wanted, **where)
    assert chosen.name == ("flash_attention_3" if loads else "sdpa")
    assert ("no module named 'kernels'" in refused.get("_flash_attention", "")) == (not loads)
    if loads:
        wrong = SimpleNamespace(flash_attn_varlen_func=lambda *a, **k: 1.1 * varlen(*a, **k))
        monkeypatch.setattr(packing, "_flash_attn", lambda: wrong)
        chosen, refused = choose(wanted, **where)
        assert (chosen.name, "differs" in refused["flash_attention_3"]) == ("sdpa", True)
