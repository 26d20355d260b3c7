"""What fine-tuning says of single tokens: their losses are the steps' own, and one that stays improbable is named."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from turngate.trainer.sft import learn
from turngate.trainer.sft_rows import IGNORED, SftRow
from turngate.trainer.sft_settings import SftSettings
from turngate.trainer.token_losses import HardToken, TokenLosses, fine_tuning_alarm

CALL, END, PROMPT = 7, 2, 5


def row(*learnt: int) -> SftRow:
    return SftRow("r", "t", (PROMPT, *learnt), (IGNORED, *learnt))


def feed(losses: TokenLosses, step: int, **named: float) -> None:
    """One forward: a loss for each of `t<ID>`."""
    ids = [int(name[1:]) for name in named]
    losses.add(step, np.array(ids), np.array(list(named.values()), dtype=np.float32))


def test_first_and_last_are_the_means_over_the_first_and_the_last_epoch() -> None:
    losses = TokenLosses([row(CALL, 9), row(CALL, 9), row(CALL, 9), row(CALL, 9)], steps=6, rows_per_step=2)
    for step, of_call in enumerate((20.0, 18.0, 9.0, 8.0, 4.0, 3.5)):
        feed(losses, step, t7=of_call, t9=1.0)
    assert losses.hardest(str) == [HardToken("7", 7, 4, 4, 19.0, 3.75), HardToken("9", 9, 4, 4, 1.0, 1.0)]
    assert losses.hardest_loss(2) == 9.0
    assert losses.hardest_loss(6) is None


def test_ids_of_few_rows_or_few_places_are_not_looked_at() -> None:
    rows = [row(CALL, END), row(CALL, END), row(CALL, END), row(CALL, END), row(END, 9, 9, 9, 9, 9), *[row(END)] * 3]
    assert TokenLosses(rows, steps=1, rows_per_step=8).ids.tolist() == [END, CALL], "9 is in one row of eight"
    assert TokenLosses([row(8), row(8), row(8)], steps=1, rows_per_step=1).hardest(str) == []


def test_the_first_token_of_a_row_is_not_learnt() -> None:
    rows = [SftRow("r", "t", (CALL, 9), (CALL, 9))] * 4
    assert TokenLosses(rows, steps=1, rows_per_step=1).ids.tolist() == [9]


def test_a_run_of_one_step_has_the_same_first_and_last() -> None:
    losses = TokenLosses([row(CALL)] * 4, steps=1, rows_per_step=4)
    feed(losses, 0, t7=2.0)
    (found,) = losses.hardest(str)
    assert found.loss_first == found.loss_last == 2.0


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([3, 5, 7, 9]), st.floats(0, 30, width=32)), min_size=1))
def test_any_split_into_forwards_gives_the_plain_means(tokens: list[tuple[int, int, float]]) -> None:
    losses = TokenLosses([row(3, 5, 7)] * 4, steps=4, rows_per_step=4)
    for step, token, loss in tokens:
        losses.add(step, np.array([token]), np.array([loss], dtype=np.float32))
    for found in losses.hardest(str):
        for told, steps in ((found.loss_first, (0,)), (found.loss_last, (3,))):
            mine = [loss for step, token, loss in tokens if token == found.id and step in steps]
            assert told == pytest.approx(np.mean(mine)) if mine else told is None


def test_a_token_that_stays_improbable_is_named_with_its_probability() -> None:
    calls = HardToken("<tool_call>", CALL, 40, 40, 21.0, 8.1)
    ends, learnt = HardToken("</tool_call>", 8, 40, 40, 20.0, 3.2), HardToken("a", 9, 4, 4, 3.0, 2.9)
    said = fine_tuning_alarm([calls, ends, learnt])
    assert said.startswith("fine-tuning: the adapter gives '<tool_call>' a probability of 0.03 % where")
    assert "'</tool_call>' 4.1 %: the policy will hardly ever write it; train longer (epochs)" in said
    assert "'a'" not in said
    assert fine_tuning_alarm([learnt]) == ""


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """Eight rows that all end with the end-of-turn token and begin with different ones."""
    path = tmp_path / "rows.jsonl"
    prompt = [1, 100, 200, 300]
    lines = [
        {"rollout": f"r{n}", "task": "t", "ids": [*prompt, 1000 + n, 500, 2], "mask": [0, 0, 0, 0, 1, 1, 1]}
        for n in range(8)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def tuned(model: Path, rows: Path, output: Path, **changed: Any) -> dict[str, Any]:
    values = {"model": str(model), "store": rows, "output": output, "device": "cpu", "threads": 2, "epochs": 1}
    values |= {"rows_per_step": 8, "rows_per_forward": 4, "lora_targets": ("q_proj",), "report_to": ()}
    return learn(SftSettings.model_validate(values | changed))


def test_the_losses_are_those_of_the_whole_logits(
    exported: Path, tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        summary = tuned(tiny_model, exported, tmp_path / "sft")
    rows = [json.loads(line)["ids"] for line in exported.read_text().splitlines()]
    with torch.no_grad():  # the adapter of a first step is zero
        logits = AutoModelForCausalLM.from_pretrained(tiny_model)(torch.tensor(rows)).logits
    dlogp = torch.log_softmax(logits.double(), -1)
    expected = {500: -dlogp[:, 4, 500].mean().item(), 2: -dlogp[:, 5, 2].mean().item()}
    told = {one["id"]: one for one in summary["hardest"]}
    assert told.keys() == expected.keys(), "the ids that every row has; not the first one, which all have once"
    for token, loss in expected.items():
        assert told[token]["loss_first"] == told[token]["loss_last"] == pytest.approx(loss, abs=2e-3)
        assert (told[token]["count"], told[token]["rows"]) == (8, 8)
        assert told[token]["token"] == AutoTokenizer.from_pretrained(tiny_model).decode([token])
    (line,) = [json.loads(one) for one in (tmp_path / "sft" / "metrics.jsonl").read_text().splitlines()]
    assert line["hardest_loss"] == pytest.approx(max(expected.values()), abs=2e-3)
    assert json.loads((tmp_path / "sft" / "sft.json").read_text()) == summary
    (alarm,) = summary["alarms"]
    assert alarm.startswith("fine-tuning: the adapter gives")
    assert f"ALARM {alarm}" in caplog.text
