"""Adapter publication: write the LoRA folder atomically, let the gateway load and route it, check it took effect.

Nothing pauses: the gateway flips new turns to the new version while turns in flight finish on the old one. Version
numbers are the gateway's; a folder, once published, is never written again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from safetensors.torch import save_file
from torch import Tensor

from turngate.proxy import wire
from turngate.proxy.client import GatewayClient, GatewayError
from turngate.trainer.errors import PublishFailed
from turngate.trainer.files import fsync_tree
from turngate.trainer.finite import check_weights

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
CANARY_TOKENS = 10
ENGINE_AWAY = 503
"""The gateway's status while its engines, or it itself, are being started again."""


def write_adapter(folder: Path, weights: Mapping[str, Tensor], config: Any) -> Path:
    """Write a PEFT adapter that vLLM loads, whole or not at all.

    Args:
        folder: where; must not exist, its parent is created.
        weights: PEFT's names (`base_model.model....lora_A.weight`) to tensors.
        config: the adapter's `peft.LoraConfig`.

    Returns:
        The absolute folder.

    Raises:
        NotFinite: a weight is NaN or infinite.
    """
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    check_weights(weights)
    folder = folder.resolve()
    draft = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    save_file(weights, draft / WEIGHTS)
    was_inference, config.inference_mode = config.inference_mode, True
    try:
        config.save_pretrained(draft)
    finally:
        config.inference_mode = was_inference
    fsync_tree(draft)
    os.rename(draft, folder)
    fsync_tree(folder.parent, deep=False)
    return folder


def publish(
    client: GatewayClient, policy: str, folder: Path, step: int, *, max_staleness: int | None = None
) -> wire.AdapterInfo:
    """Make `folder` the policy's next version, live on every replica.

    With `max_staleness` the gateway ends the rollouts that can no longer be trained once it is live.

    Raises:
        PublishFailed: it was refused or a replica could not load it; the old version stays routed.
        GatewayError: there was no answer at all, or (503) no engine is there now; safe to ask again, it only costs a
            version number.
    """
    try:
        new = wire.PublishAdapter(policy=policy, path=str(folder), step=step, max_staleness=max_staleness)
        info = client.publish_adapter(new)
    except GatewayError as error:
        if error.status not in (0, ENGINE_AWAY):
            raise PublishFailed(f"adapter {folder} of step {step} did not go live: {error}") from error
        raise
    if info.state != "live":
        raise PublishFailed(f"adapter {folder} of step {step} is {info.state}: {info.cause or 'no cause given'}")
    return info


def remove_drafts(parent: Path) -> None:
    """Delete what a killed process left half-written in `parent`."""
    for draft in parent.glob(".*.tmp"):
        shutil.rmtree(draft, ignore_errors=True)


def prune_adapters(parent: Path, keep: int, protect: Sequence[str]) -> None:
    """Delete the oldest adapter folders in `parent` beyond `keep`, but none whose path is in `protect`."""
    folders = sorted((f for f in parent.glob("step-*") if f.is_dir()), key=lambda f: f.stat().st_mtime_ns)
    for folder in folders[: max(len(folders) - keep, 0)]:
        if str(folder.resolve()) not in protect:
            shutil.rmtree(folder, ignore_errors=True)


def canary(
    engine_url: str, adapter: str, base_model: str, prompt_ids: Sequence[int], *, timeout_s: float = 60.0
) -> float:
    """Largest difference between the adapter's and the base's log-probabilities of what may follow `prompt_ids`.

    0 means the engine answers to the adapter's name with the base's weights. It asks for the likeliest next tokens, not
    for the prompt's own log-probabilities: those, beside other requests, end vLLM's CPU build once LoRA is on (0.32:
    its LoRA logits expect one position a request).

    Args:
        engine_url: a vLLM server, without `/v1`.
        adapter: name the adapter was loaded under.
        base_model: the served base model's name.
        prompt_ids: at least 1 token id.

    Raises:
        PublishFailed: the engine refused or answered something else.
    """
    with httpx.Client(base_url=engine_url.rstrip("/"), timeout=timeout_s, trust_env=False) as http:
        of_adapter = _next_logprobs(http, adapter, prompt_ids)
        of_base = _next_logprobs(http, base_model, prompt_ids)
    common = of_adapter.keys() & of_base.keys()
    if not common:
        raise PublishFailed(f"canary: {adapter} and {base_model} share none of their {CANARY_TOKENS} likeliest tokens")
    return max(abs(of_adapter[token] - of_base[token]) for token in common)


def _next_logprobs(http: httpx.Client, model: str, prompt_ids: Sequence[int]) -> dict[int, float]:
    sampling = {"max_tokens": 1, "temperature": 1.0, "logprobs": CANARY_TOKENS}
    body = {"model": model, "token_ids": list(prompt_ids), "sampling_params": sampling}
    try:
        answer = http.post("/inference/v1/generate", json=body)
        answer.raise_for_status()
        likeliest = answer.json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        return {_token_id(entry): float(entry["logprob"]) for entry in likeliest}
    except (httpx.HTTPError, KeyError, IndexError, TypeError, ValueError) as error:
        raise PublishFailed(f"canary: {model} at {http.base_url} gave no log-probabilities: {error}") from error


def _token_id(entry: Mapping[str, Any]) -> int:
    """The entry's `token_id`, which vLLM 0.26 writes as the text `token_id:<id>` under `token`."""
    return int(entry["token_id"] if "token_id" in entry else str(entry["token"]).removeprefix("token_id:"))
