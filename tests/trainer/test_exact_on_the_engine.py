"""The trainer against the real vLLM: tokens of each adapter version, recomputed with the weights that were published.

Each group is sampled after the newest version was published and before the next one, so every row that is compared
comes wholly from the version the trainer holds.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.conftest import FindModel
from tests.engines import RealEngine
from tests.gateway_process import GatewayProcess
from turngate.proxy import wire
from turngate.proxy.verify import verify_store
from turngate.trainer.settings import TrainSettings
from turngate.trainer.train import train

pytestmark = pytest.mark.engine

STEPS = 5
POLICY = "policy"
QUESTIONS = ("Name a colour.", "Name an animal.", "Say a word.", "Name a city.", "Name a fruit.")


def talk(client: openai.OpenAI, question: str) -> None:
    """Two turns, the first answer echoed."""
    messages: list[Any] = [{"role": "user", "content": question}]
    for follow_up in ("Another one.", None):
        answer = client.chat.completions.create(model=POLICY, messages=messages, max_tokens=20).choices[0].message
        messages.append({"role": "assistant", "content": answer.content})
        if follow_up:
            messages.append({"role": "user", "content": follow_up})


def wait_for_version(gateway: GatewayProcess, version: int, stop: threading.Event) -> bool:
    """Whether `version` became the newest one before `stop` was set."""
    while not stop.is_set():
        if gateway.client.policy(POLICY).version == version:
            return True
        time.sleep(0.05)
    return False


def sample_each_version(gateway: GatewayProcess, stop: threading.Event) -> None:
    """One group of two rollouts from every version as soon as it is published, the base first."""
    try:
        for version, question in zip(range(STEPS), QUESTIONS, strict=True):
            if not wait_for_version(gateway, version, stop):
                return
            # Both are opened before one is finished: the group is whole, and sampled, before the trainer can lease it.
            sessions = [gateway.session(policy=POLICY, group=f"of-v{version}", group_size=2) for _ in range(2)]
            for created, client in sessions:
                assert created.version == version
                talk(client, question)
            for reward, (created, _) in enumerate(sessions):
                gateway.client.finish_rollout(created.id, wire.FinishRollout(reward=float(reward)))
    except BaseException:
        stop.set()
        raise


def test_recorded_log_probabilities_are_those_of_the_published_weights(
    smollm_engine: RealEngine, model_dir: FindModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stop = threading.Event()
    # A server that outlives the test keeps adapters by name: a run name of its own makes them new.
    run = ("--run", f"exact-{uuid.uuid4().hex[:8]}")
    with (
        GatewayProcess(smollm_engine.url, tmp_path / "store", *run) as gateway,
        ThreadPoolExecutor(max_workers=1) as pool,
    ):
        settings = TrainSettings(
            model=str(model_dir("smollm2-135m")),
            gateway=gateway.url,
            admin_key_file=gateway.store / "admin.key",
            policy=POLICY,
            output=tmp_path / "train",
            steps=STEPS,
            groups_per_step=1,
            prefetch_steps=0,
            token_budget=512,
            learning_rate=5e-3,
            lora_r=4,
            lora_targets=("q_proj", "v_proj"),
            lora_last_layers=2,
            dtype="float32",
            device="cpu",
            threads=1,
            save_steps=STEPS,
            idle_timeout_s=120,
            engine_url=smollm_engine.url,
        )
        sampling = pool.submit(sample_each_version, gateway, stop)
        try:
            status = train(settings, stop)
        finally:
            stop.set()
            sampling.result(timeout=120)
        versions = gateway.client.policy(POLICY).version

    lines = [json.loads(line) for line in (tmp_path / "train" / "metrics.jsonl").read_text().splitlines()]
    with capsys.disabled():
        for line in lines:
            print(
                f"\nversion {line['exact/version']:.0f}: {line['exact/tokens']:.0f} tokens, "
                f"ratio mean {line['exact/ratio_mean']:.6f}, max |Δ log-prob| {line['exact/max_abs_dlogp']:.2e}",
                end="",
            )
    assert (status, versions, len(lines)) == (0, STEPS, STEPS)
    assert [line["exact/version"] for line in lines] == [line["held_version"] for line in lines] == [*range(STEPS)]
    for line in lines:
        assert line["staleness_max"] == 0, "a token of another version was trained"
        assert (line["exact/rows"], line["exact/tokens"]) == (line["rows"], line["tokens"])
        assert line["tokens"] > 0
        assert 0.98 <= line["exact/ratio_mean"] <= 1.02
        assert line["exact/max_abs_dlogp"] < 0.01
    assert lines[0]["canary/trainer_max_abs_dlogp"] > 0.01
    assert max(line["canary/engine_max_abs_dlogp"] for line in lines) > 0.001, "adapters must change what is answered"
    report = verify_store(tmp_path / "store")
    assert (report.problems, report.breaks) == ([], {})
    assert report.rows == report.exact_rows == 2 * STEPS
