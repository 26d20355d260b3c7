"""The whole trainer on a tiny model: steps, versions, exactness, weighting, kills and resume."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainerCallback

from tests.trainer.make import simple_group
from tests.trainer.stub_gateway import KEY, StubGateway
from tests.trainer.test_eval_stats import record
from turngate.proxy.client import GatewayClient
from turngate.trainer import checkpoint, eval_log
from turngate.trainer import train as train_module
from turngate.trainer.alarms import gradient_alarm
from turngate.trainer.errors import NeverFinite
from turngate.trainer.lease_source import LeaseSource, LeaseTerms
from turngate.trainer.planner import Staleness, StepPlan, plan_step
from turngate.trainer.restarts import IN_VAIN
from turngate.trainer.rows import GroupRows
from turngate.trainer.run import Run
from turngate.trainer.settings import ADMIN_KEY_VARIABLE, TrainSettings
from turngate.trainer.train import train
from turngate.trainer.trl_seam import GatewayTrainer, Packed, TreeBin


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADMIN_KEY_VARIABLE, KEY)


def settings_for(gateway: StubGateway, model: Path, output: Path, **changed: Any) -> TrainSettings:
    values = {
        "model": str(model),
        "gateway": gateway.url,
        "output": output,
        "steps": 4,
        "groups_per_step": 2,
        "token_budget": 40,
        "learning_rate": 1e-2,
        "device": "cpu",
        "threads": 2,
        "lora_targets": ("q_proj", "v_proj"),
    }
    return TrainSettings.model_validate(values | changed)


def metrics(output: Path) -> list[dict[str, Any]]:
    path = output / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_each_step_trains_whole_groups_and_publishes_a_new_version(
    gateway: StubGateway, tiny_model: Path, tmp_path: Path
) -> None:
    gateway.script = {1: [1.0, 1.0, 1.0]}
    assert train(settings_for(gateway, tiny_model, tmp_path), threading.Event()) == 0
    steps = metrics(tmp_path)
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert [line["version"] for line in steps] == [1, 2, 3, 4] == [info.version for info in gateway.versions]
    assert [line["held_version"] for line in steps] == [0, 1, 2, 3]
    assert gateway.durable_steps == [1, 2, 3, 4]
    assert ("g1", "zero_variance", 1) in gateway.history
    assert sum(line["zero_variance"] for line in steps) == 1
    trained = [(group, step) for group, fate, step in gateway.history if fate == "trained"]
    assert len(trained) == len({group for group, _ in trained}) == 8
    assert Counter(step for _, step in trained) == {1: 2, 2: 2, 3: 2, 4: 2}
    stats = gateway.acks["g0"][1].rows
    assert {row["rollout"] for row in stats} == {"r0-0", "r0-1", "r0-2"}
    assert sum(row["trained_tokens"] for row in stats) == 18
    assert train(settings_for(gateway, tiny_model, tmp_path), threading.Event()) == 0
    assert metrics(tmp_path) == steps, "a finished run that is started again makes no further step"


def test_a_synchronous_batch_is_settled_when_its_version_is_live_or_has_failed(
    gateway: StubGateway, tiny_model: Path, tmp_path: Path
) -> None:
    gateway.limit, gateway.fail_publications = 6, 1
    train(settings_for(gateway, tiny_model, tmp_path, steps=3, schedule="sync"), threading.Event())
    assert [(line["groups"], line.get("version")) for line in metrics(tmp_path)] == [(2, None), (2, 1), (2, 2)]
    trained = [(step, gateway.live_at_ack[group]) for group, fate, step in gateway.history if fate == "trained"]
    assert trained == [(1, 0)] * 2 + [(2, 1)] * 2 + [(3, 2)] * 2


def test_recomputed_and_recorded_log_probabilities_agree_for_every_version(
    gateway: StubGateway, tiny_model: Path, tmp_path: Path
) -> None:
    train(settings_for(gateway, tiny_model, tmp_path, learning_rate=5e-2, groups_per_step=1), threading.Event())
    steps = metrics(tmp_path)
    assert len({line["exact/version"] for line in steps}) >= 3
    for line in steps:
        assert line["exact/ratio_mean"] == pytest.approx(1.0, abs=1e-4)
        assert line["exact/max_abs_dlogp"] < 1e-4
    assert steps[0]["canary/trainer_max_abs_dlogp"] > 1e-3


def test_the_kl_to_the_base_begins_at_zero_and_grows_with_learning(
    gateway: StubGateway, tiny_model: Path, tmp_path: Path
) -> None:
    changed = {"steps": 3, "groups_per_step": 1, "learning_rate": 5e-2, "kl_coefficient": 0.1}
    train(settings_for(gateway, tiny_model, tmp_path, **changed), threading.Event())
    found = [line["kl_base"] for line in metrics(tmp_path)]
    assert found[0] == pytest.approx(0.0, abs=1e-9)
    assert found[2] > 1e-4


def test_rows_of_older_versions_are_compared_with_those_versions(tiny_model: Path, tmp_path: Path) -> None:
    with StubGateway(tiny_model, lag=2) as gateway:
        changed = {"steps": 5, "groups_per_step": 1, "learning_rate": 5e-2}
        train(settings_for(gateway, tiny_model, tmp_path, **changed), threading.Event())
    steps = metrics(tmp_path)
    assert any(abs(line["ratio_mean"] - 1) > 1e-3 for line in steps), "learning must show in the stale rows"
    assert all(line["exact/version"] < line["held_version"] for line in steps[1:])
    assert steps[-1]["exact/version"] >= 1
    assert all(line["exact/max_abs_dlogp"] < 1e-4 for line in steps)


def test_a_failed_publication_keeps_the_old_version_and_the_run_goes_on(
    gateway: StubGateway, tiny_model: Path, tmp_path: Path
) -> None:
    gateway.fail_publications = 1
    assert train(settings_for(gateway, tiny_model, tmp_path, steps=3), threading.Event()) == 0
    steps = metrics(tmp_path)
    assert [line.get("version") for line in steps] == [None, 1, 2]
    assert steps[0]["settled"]["publication failed"] == 1


def spoil(monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    """Let a division by zero into the gradients of these steps; the loss itself stays a number."""
    right = GatewayTrainer.compute_loss

    def compute_loss(self: GatewayTrainer, model: Any, inputs: Any, *args: Any) -> torch.Tensor:
        loss = right(self, model, inputs, *args)
        assert self._plan is not None
        return loss + (loss * 0.0).abs().sqrt() if self._plan.step in steps else loss

    monkeypatch.setattr(GatewayTrainer, "compute_loss", compute_loss)


def test_a_step_whose_gradient_is_not_finite_changes_no_weight_and_the_run_goes_on(
    gateway: StubGateway, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, 2)
    decaying = settings_for(gateway, tiny_model, tmp_path, weight_decay=0.5)
    assert train(decaying.model_copy(update={"steps": 2}), threading.Event()) == 0
    first, second = (
        load_file(tmp_path / "checkpoints" / f"checkpoint-{step}" / "adapter_model.safetensors") for step in (1, 2)
    )
    assert all(torch.equal(first[name], tensor) for name, tensor in second.items()), "momentum and decay wait, too"
    assert train(decaying, threading.Event()) == 0
    assert [info.step for info in gateway.versions] == [1, 3, 4], "a resume behind such a step publishes nothing anew"
    assert gateway.durable_steps == [1, 2, 2, 3, 4]
    fates = {step: {fate for _, fate, at in gateway.history if at == step} for step in (1, 2, 3, 4)}
    assert fates == {1: {"trained"}, 2: {"dropped"}, 3: {"trained"}, 4: {"trained"}}
    lines = metrics(tmp_path)
    assert [line.get("version") for line in lines] == [1, None, 2, 3]
    assert [line["held_version"] for line in lines] == [0, 1, 1, 2]
    assert lines[1]["settled"] == {"dropped: gradient not finite": 2}
    assert [(line["groups"], line["tokens"] > 0, line["grad_norm"] is None) for line in lines[:3]] == [
        (2, True, False),
        (0, False, True),
        (2, True, False),
    ]
    assert "that of step 2 was not finite" in gradient_alarm(lines[1])
    assert not gradient_alarm(lines[2])
    assert all(line["exact/max_abs_dlogp"] < 1e-3 for line in lines if "exact/max_abs_dlogp" in line)


def test_gradients_that_are_never_finite_end_the_run_and_say_what_to_do(
    gateway: StubGateway, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, 1, 2, 3, 4)
    with pytest.raises(NeverFinite, match=r"3 steps in a row, the last is 3.* gradients are not finite.*learning_rate"):
        train(settings_for(gateway, tiny_model, tmp_path), threading.Event())
    assert gateway.versions == []


def test_training_in_vain_ends_with_a_status_that_is_no_reason_to_start_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_vain(*_: Any) -> int:
        raise NeverFinite("3 steps in a row")

    monkeypatch.setattr(train_module, "train", in_vain)
    monkeypatch.setattr(train_module, "_stop_on_signals", lambda stop: None)
    words = ["--model", "none", "--gateway", "http://127.0.0.1:1", "--output", str(tmp_path / "out")]
    assert train_module.train_command(words) == IN_VAIN


def test_a_publication_waits_for_engines_that_are_being_started_again_and_gives_up_like_a_failed_one(
    gateway: StubGateway, tiny_model: Path, tmp_path: Path
) -> None:
    gateway.engines_away = 2
    assert train(settings_for(gateway, tiny_model, tmp_path / "back", steps=1), threading.Event()) == 0
    assert [line["version"] for line in metrics(tmp_path / "back")] == [1]
    gateway.engines_away = 10_000
    made = settings_for(gateway, tiny_model, tmp_path / "gone", steps=1, gateway_patience_s=0.3)
    assert train(made, threading.Event()) == 0
    (step,) = metrics(tmp_path / "gone")
    assert "version" not in step
    assert step["settled"]["publication failed"] == 2


def near_on_policy(group: GroupRows) -> GroupRows:
    """The group with recorded log-probabilities near those of a random model: some ratios clipped, most not."""
    uniform = -float(np.log(49152))
    rows = []
    for row in group.rows:
        wave = uniform + 0.3 * np.sin(np.arange(len(row.ids)) * (1 + row.advantage))
        rows.append(dataclasses.replace(row, logprobs=np.where(row.mask, wave, 0.0).astype(np.float32)))
    return dataclasses.replace(group, rows=tuple(rows))


def make_trainer(
    gateway: StubGateway, model: Path, output: Path, client: GatewayClient, **changed: Any
) -> GatewayTrainer:
    settings = settings_for(gateway, model, output, **changed)
    terms = LeaseTerms(policy="policy", ahead=1, ttl_s=60, patience_s=5, max_row_tokens=None)
    source = LeaseSource(client, terms, lineage={}, step=0)
    run = Run(settings, client, source, checkpoint.RunState(0, 0, "policy"))
    return GatewayTrainer(settings, run, source, threading.Event())


def test_the_gradient_of_a_step_does_not_depend_on_how_it_is_split_or_ordered(
    gateway: StubGateway, tiny_model: Path, tmp_path: Path
) -> None:
    with GatewayClient(gateway.url, KEY) as client:
        trainer = make_trainer(gateway, tiny_model, tmp_path, client)
        trainer.model.double()
        groups = [near_on_policy(simple_group(f"g{i}", [0.0, 1.0, 0.3], tokens=3 + 2 * i)) for i in range(4)]
        trainer.get_train_dataloader()
        for name, parameter in trainer.model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(3))

        rows = plan_step(groups, step=1, version=0, max_staleness=4, new_bin=lambda: TreeBin(1000)).rows
        assert len(rows) == 12

        def gradient(order: Sequence[int], parts: int, kl: float = 0.0) -> torch.Tensor:
            """Of the same rows in this order, in so many micro-batches of nearly as many rows."""
            cuts = [round(part * len(order) / parts) for part in range(parts + 1)]
            micro = tuple((tuple(rows[at] for at in order[a:b]),) for a, b in pairwise(cuts))
            tokens = sum(row.tokens for row in rows)
            plan = StepPlan(1, 0, tuple(groups), micro, tokens, Staleness(0.0, 0, 0))
            trainer.settings = trainer.settings.model_copy(update={"kl_coefficient": kl})
            trainer.model.zero_grad()
            trainer.training_step(trainer.model, {"plan": plan}, None)
            grads = [p.grad.flatten() for p in trainer.model.parameters() if p.requires_grad and p.grad is not None]
            return torch.cat(grads)

        whole = gradient(range(12), 1)
        for parts in (1, 2, 7):
            for seed in range(2):
                order = random.Random(f"{parts}{seed}").sample(range(12), 12)
                # the model runs in float64, TRL's fused head in float32
                limit = 2e-6 * float(whole.abs().max())
                torch.testing.assert_close(gradient(order, parts), whole, atol=limit, rtol=1e-5)
        assert float(whole.abs().max()) > 1e-4
        held = gradient(range(12), 1, kl=0.5)
        assert float((held - whole).abs().max()) > 1e-5, "the divergence to the base has a gradient"
        limit = 2e-6 * float(held.abs().max())
        torch.testing.assert_close(gradient(range(11, -1, -1), 7, kl=0.5), held, atol=limit, rtol=1e-5)


class Tracker(TrainerCallback):
    """What any tracker of the Trainer is told, and whether it was still open."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []
        self.closed = False

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        assert not self.closed
        self.told.append(dict(logs))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.closed = True


def test_every_evaluation_is_in_one_steps_line_and_the_last_ones_reach_the_trackers(
    gateway: StubGateway, tiny_model: Path, tmp_path: Path
) -> None:
    def evaluated(name: str, step: int) -> None:
        eval_log.append(tmp_path, record(name, step, 4))

    def evaluator() -> None:
        while not (tmp_path / eval_log.TRAINED).exists():
            time.sleep(0.01)
        evaluated("step-2", 2)
        (tmp_path / eval_log.OVER).touch()

    evaluated("base", 0)
    evaluated("start", 0)
    evaluated("step-1", 1)
    with GatewayClient(gateway.url, KEY) as client:
        trainer = make_trainer(gateway, tiny_model, tmp_path, client, steps=2, await_evaluation_s=60.0)
        trainer.add_callback(tracker := Tracker())
        beside = threading.Thread(target=evaluator)
        beside.start()
        trainer.train()
        beside.join()
    lines = metrics(tmp_path)
    assert [(line["step"], line["eval/step"], line["eval/version"]) for line in lines] == [(1, 0, 0), (2, 0, 0)]
    told = [logs for logs in tracker.told if "eval/step" in logs]
    assert [("loss" in logs, logs["eval/step"]) for logs in told] == [(True, 0), (True, 0), (False, 1), (False, 2)]
    assert all(logs.keys() >= eval_log.eval_metrics(record("x", 0, 4)).keys() for logs in told)
    assert {"loss", "reward_mean", "entropy", "staleness_max", "wait_s"} <= tracker.told[0].keys()


def test_log_probabilities_and_entropies_of_a_packed_step_are_those_of_plain_forwards_in_float64(
    gateway: StubGateway, tiny_model: Path, tmp_path: Path
) -> None:
    with GatewayClient(gateway.url, KEY) as client:
        trainer = make_trainer(gateway, tiny_model, tmp_path, client)
        trainer.model.double()
        plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
        groups = [near_on_policy(simple_group(f"g{i}", [0.0, 1.0, 0.3], tokens=3 + 2 * i)) for i in range(2)]
        plan = plan_step(groups, step=1, version=0, max_staleness=4, new_bin=lambda: TreeBin(1000))
        assert len(plan.micro) == 1, "all rows share one forward"
        rows = [row for row in plan.rows if row.tokens]
        with torch.no_grad():
            packed = Packed.of(rows, torch.device("cpu"))
            found, entropy = trainer.logprobs(trainer.model, packed)
            for index, row in enumerate(rows):
                mine = packed.tensors["segment_id"] == index
                ids, at = torch.tensor(row.row.ids[None].astype(np.int64)), torch.tensor(np.flatnonzero(row.mask))
                table = plain(input_ids=ids).logits[0].log_softmax(-1)[at - 1]
                expected = table.gather(1, ids[0, at][:, None])[:, 0]
                torch.testing.assert_close(found[mine].double(), expected, atol=1e-5, rtol=1e-5)
                torch.testing.assert_close(entropy[mine].double(), -(table.exp() * table).sum(-1), atol=1e-4, rtol=1e-5)
            for name, parameter in trainer.model.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(3))
            assert float((trainer.logprobs(trainer.model, packed)[0] - found).abs().max()) > 1e-3
            base = trainer.base_logprobs(trainer.model, packed)
            torch.testing.assert_close(base, found, atol=1e-6, rtol=0, msg="the base is the model with its adapter off")


def start(gateway: StubGateway, model: Path, output: Path, steps: int, **changed: Any) -> subprocess.Popen[bytes]:
    file = output / "run.yaml"
    output.mkdir(exist_ok=True)
    made = settings_for(gateway, model, output, steps=steps, **changed)
    file.write_text(json.dumps({"train": made.model_dump(mode="json")}))
    code = "import sys; from turngate.trainer.train import train_command; sys.exit(train_command(sys.argv[1:]))"
    with (output / "log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-c", code, "--config", str(file)], stdout=log, stderr=log, env=dict(os.environ)
        )


def wait_for_step(output: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 180
    while not any(line["step"] >= step for line in metrics(output)):
        assert process.poll() is None, (output / "log").read_text()[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def lineage_of(gateway: StubGateway) -> dict[str, int]:
    """Groups acknowledged as trained that were not returned since, with their step."""
    return {group: step for group, (step, ack) in gateway.acks.items() if ack.fate == "trained"}


def test_killed_and_started_again_it_resumes_and_trains_no_group_twice(
    gateway: StubGateway, tiny_model: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    process = start(gateway, tiny_model, output, 6)
    try:
        wait_for_step(output, 2, process)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    found = checkpoint.newest_complete(output / "checkpoints")
    assert found is not None
    folder, state = found
    assert state.step >= 1
    adapter = load_file(folder / "adapter_model.safetensors")
    versions_before = [info.version for info in gateway.versions]
    gateway.script = {len(gateway.groups): [2.0, 2.0, 2.0]}

    process = start(gateway, tiny_model, output, 6)
    assert process.wait(timeout=240) == 0, (output / "log").read_text()[-3000:]
    assert gateway.resumed == [0, state.step]
    first_new = metrics(output)[-(6 - state.step)]
    assert first_new["step"] == state.step + 1
    versions = [info.version for info in gateway.versions]
    assert versions == sorted(set(versions))
    assert first_new["version"] > max(versions_before)
    final = checkpoint.newest_complete(output / "checkpoints")
    assert final is not None
    assert final[1].step == 6
    lineage = final[1].lineage
    assert lineage == lineage_of(gateway)
    assert Counter(lineage.values()) == dict.fromkeys(range(1, 7), 2)
    settled = {group: ack.fate for group, (_, ack) in gateway.acks.items()}
    ahead = {group for group, fate in gateway.state.items() if fate in ("leased", "ready")}
    assert settled.keys() | ahead == gateway.groups.keys()
    trainer_state = json.loads((final[0] / "trainer_state.json").read_text())
    assert trainer_state["global_step"] == 6
    assert [entry["step"] for entry in trainer_state["log_history"] if "loss" in entry] == [1, 2, 3, 4, 5, 6]
    optimizer = torch.load(final[0] / "optimizer.pt", weights_only=True)
    assert {int(entry["step"]) for entry in optimizer["state"].values()} == {6}
    assert any(
        not torch.equal(adapter[name], tensor)
        for name, tensor in load_file(final[0] / "adapter_model.safetensors").items()
    )


def test_killed_before_its_first_checkpoint_it_has_the_weights_it_starts_from_routed_to(
    gateway: StubGateway, tiny_model: Path, tmp_path: Path
) -> None:
    assert train(settings_for(gateway, tiny_model, tmp_path / "lost", steps=1), threading.Event()) == 0
    (tmp_path / "again" / "adapters" / ".step-000001-0.tmp").mkdir(parents=True)
    assert train(settings_for(gateway, tiny_model, tmp_path / "again", steps=1), threading.Event()) == 0
    (step,) = metrics(tmp_path / "again")
    assert (step["held_version"], step["version"]) == (2, 3)
    assert [info.step for info in gateway.versions] == [1, 0, 1]
    assert not list((tmp_path / "again" / "adapters").glob(".*"))
    assert set(lineage_of(gateway).values()) == {1}


def test_a_torn_newest_checkpoint_returns_its_groups_to_be_trained_again(
    gateway: StubGateway, tiny_model: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    assert train(settings_for(gateway, tiny_model, output, steps=2), threading.Event()) == 0
    second = {group for group, step in lineage_of(gateway).items() if step == 2}
    torn = checkpoint.folder_of(output / "checkpoints", 2) / "optimizer.pt"
    torn.write_bytes(torn.read_bytes()[:100])
    assert train(settings_for(gateway, tiny_model, output, steps=3), threading.Event()) == 0
    assert gateway.resumed == [0, 1]
    assert [info.version for info in gateway.versions] == [1, 2, 3, 4, 5]
    assert [line["held_version"] for line in metrics(output)] == [0, 1, 3, 4]
    assert {group for group, step in lineage_of(gateway).items() if step == 2} == second


def test_asked_to_stop_it_writes_a_checkpoint_and_exits_as_interrupted(
    gateway: StubGateway, tiny_model: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    process = start(gateway, tiny_model, output, 500, save_steps=400)
    try:
        wait_for_step(output, 1, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 130, (output / "log").read_text()[-3000:]
    finally:
        process.kill()
    found = checkpoint.newest_complete(output / "checkpoints")
    assert found is not None
    assert found[1].step == metrics(output)[-1]["step"] == gateway.durable_steps[-1]


def test_a_dry_source_ends_the_run_cleanly_when_asked_to(
    gateway: StubGateway, tiny_model: Path, tmp_path: Path
) -> None:
    gateway.limit = 3
    made = settings_for(gateway, tiny_model, tmp_path, idle_timeout_s=1.0)
    assert train(made, threading.Event()) == 0
    assert [line["step"] for line in metrics(tmp_path)] == [1]
    assert gateway.durable_steps == [1]
