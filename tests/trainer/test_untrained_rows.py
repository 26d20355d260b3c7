"""Tokens that share their row of the output head: found before a step, and no training makes them probable."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from turngate.trainer.sft import learn
from turngate.trainer.sft_settings import SftSettings
from turngate.trainer.untrained_rows import MANY, twins_of, untrained_alarm

CALL = 500
TWINS = 30


def test_twins_are_rows_that_are_nearly_the_same() -> None:
    torch.manual_seed(0)
    head = torch.randn(20_000, 16)
    head[[3, 9_000, 19_999]] = head[7] * 1.001
    head[5] = head[7] * 1.1
    assert twins_of(head, torch.tensor([7, 3, 8])) == [3, 3, 0]
    assert twins_of(head.to(torch.bfloat16), torch.tensor([7, 8])) == [3, 0]


def test_few_twins_are_no_matter() -> None:
    assert untrained_alarm({"a": 0, "b": MANY - 1}) == ""
    assert "probability: '<tool_call>' 0.00045 (7.7 nats). So" in untrained_alarm({"a": 0, "<tool_call>": 2244})


def test_what_no_adapter_can_teach_is_said_instead_of_train_longer(tiny_model: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_model, base)
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        rows = model.get_output_embeddings().weight
        rows[40_000 : 40_000 + TWINS] = rows[CALL]
    model.save_pretrained(base)
    path = tmp_path / "rows.jsonl"
    lines = [{"rollout": f"r{n}", "task": "t", "ids": [1, 100, CALL, 2], "mask": [0, 0, 1, 1]} for n in range(8)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    values = {"model": str(base), "store": path, "output": tmp_path / "sft", "device": "cpu", "threads": 2}
    values |= {"epochs": 3, "rows_per_step": 8, "rows_per_forward": 8, "learning_rate": 3e-2, "report_to": ()}
    summary = learn(SftSettings.model_validate(values))
    told = {one["id"]: one for one in summary["hardest"]}
    assert (told[CALL]["twins"], told[2]["twins"]) == (TWINS, 0)
    assert told[CALL]["loss_last"] >= math.log(TWINS + 1) - 0.01, "31 tokens have the same logit"
    never, later = summary["alarms"]
    assert f"{told[CALL]['token']!r} 0.032 (3.4 nats)" in never
    assert "train longer" in later, "of the other token, which has a row of its own"
    assert repr(told[CALL]["token"]) not in later
