"""A gateway of two workers: sessions on both, exact rows from both, adapters live in both, one status for both."""

from __future__ import annotations

import json
import re
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.fake_engine.script import Script
from tests.fake_engine.settings import FakeSettings
from tests.gateway_process import GatewayProcess
from tests.proxy.conftest import Gate, StartFake, StartGateway
from tests.proxy.test_exact_rows import TOOLS, prove
from tests.proxy.test_faults import BODY, wait_for
from tests.proxy.test_policies import publish, say
from tests.tap import Tap
from turngate.proxy import wire
from turngate.proxy.client import GatewayError
from turngate.proxy.store.layout import StoreFolder
from turngate.proxy.store.turnstore import TurnStore

TWO = ("--workers", "2")


@pytest.fixture
def lora(tmp_path: Path) -> str:
    """A folder that looks like a LoRA."""
    folder = tmp_path / "lora"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    return str(folder)


def test_rows_of_sessions_on_both_workers_are_leased_together_and_exact(
    start_fake: StartFake, start_gateway: StartGateway
) -> None:
    script = [
        {"content": "Reading.", "tool_calls": [{"name": "bash", "arguments": '{"a":  1.50}'}]},
        "Plain text, no call.  ",
        {"tool_calls": [{"name": "bash", "arguments": '{"broken": '}]},
    ]
    with Tap(start_fake(script).url) as tap:
        gateway = start_gateway(tap.url, *TWO)
        prove(gateway, tap, [f"Task {i}" for i in range(4)], turns=4, tools=TOOLS)
    for worker in (0, 1):
        with TurnStore(StoreFolder.find(gateway.store).turns(worker), readonly=True) as store:
            assert len(list(store.rollouts())) == 2


def test_a_session_is_placed_where_the_fewest_are_and_served_there_alone(two: Gate) -> None:
    gateway = two.says(["Fine."])
    created = [gateway.session()[0] for _ in range(4)]
    ports = [urlsplit(one.base_url).port for one in created]
    assert len(set(ports)) == 2
    assert ports[:2] == ports[2:]
    assert [one.api_key[:6] for one in created] == ["tg-w0-", "tg-w1-", "tg-w0-", "tg-w1-"]
    gateway.client.finish_rollout(created[1].id, wire.FinishRollout(reward=1.0))
    assert urlsplit(gateway.session()[0].base_url).port == ports[1], "it has one session fewer now"
    elsewhere = created[0].base_url.replace(str(ports[0]), str(ports[1]))
    assert httpx.post(f"{elsewhere}/chat/completions", json=BODY).status_code == 404
    assert httpx.post(f"http://127.0.0.1:{ports[0]}/internal/sessions/{created[0].id}/close").status_code == 404
    assert httpx.post(f"{created[0].base_url}/chat/completions", json=BODY).status_code == 200


def test_a_finished_rollout_takes_no_turn_and_keeps_what_was_committed(two: Gate) -> None:
    fake, gateway = two.fake, two.says(["one two three four five six seven eight"])
    fake.engine.settings = FakeSettings(tokens_per_s=4.0)
    gateway.session()
    created, client = gateway.session()
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(httpx.post, f"{created.base_url}/chat/completions", json=BODY, timeout=60)
        assert wait_for(lambda: fake.seen("/inference/v1/generate"))
        with pytest.raises(GatewayError, match="cause"):
            gateway.client.finish_rollout(created.id, wire.FinishRollout(outcome="unscorable"))
        done = gateway.client.finish_rollout(created.id, wire.FinishRollout(reward=1.0))
        assert asked.result().status_code == 410
    assert (done.state, done.turns) == ("finished", 0)
    assert gateway.client.finish_rollout(created.id, wire.FinishRollout(reward=1.0)).turns == 0
    with pytest.raises(GatewayError, match="was finished as scored"):
        gateway.client.finish_rollout(created.id, wire.FinishRollout(reward=0.5))
    assert httpx.post(f"{created.base_url}/chat/completions", json=BODY).status_code == 410
    client.close()


def test_a_published_version_is_live_in_both_workers_and_leaves_after_the_last_turn_that_names_it(
    start_fake: StartFake, start_gateway: StartGateway, lora: str
) -> None:
    fake = start_fake(["Fine."])
    gateway = start_gateway(fake.url, *TWO)
    old = [gateway.session() for _ in range(2)]
    first = publish(gateway, lora)
    pinned = [gateway.session() for _ in range(2)]
    followers = [gateway.session(pin="turn") for _ in range(2)]
    second = publish(gateway, lora)
    for _, client in (*old, *pinned, *followers):
        say(client)
    asked = [body["model"] for body in fake.seen("/inference/v1/generate")[-6:]]
    assert asked == ["fake", "fake", first.name, first.name, second.name, second.name]
    fake.engine.script = Script.of(["word " * 400])
    fake.engine.settings = FakeSettings(tokens_per_s=2.0)
    url = f"{followers[1][0].base_url}/chat/completions"
    with httpx.stream("POST", url, json={**BODY, "stream": True}, timeout=120) as turn:
        lines = turn.iter_lines()  # kept: httpx ends the answer with it
        assert next(lines)
        publish(gateway, lora)
        assert second.name in fake.engine.adapters, "a turn of the second worker still samples with it"
        assert [live.version for live in gateway.client.policy("policy").live] == [1, 2, 3]
        for created, _ in pinned:
            gateway.client.finish_rollout(created.id, wire.FinishRollout(reward=1.0))
        assert first.name not in fake.engine.adapters
        assert second.name in fake.engine.adapters
    assert wait_for(lambda: second.name not in fake.engine.adapters)
    assert wait_for(lambda: [live.version for live in gateway.client.policy("policy").live] == [3])


def test_status_and_metrics_are_of_all_workers(two: Gate) -> None:
    gateway = two.says(["Fine."])
    before, turns_before = counted(gateway), gateway.client.status().turns
    for _, client in [gateway.session() for _ in range(3)]:
        say(client)
    assert gateway.client.status().turns == turns_before + 3
    after = counted(gateway)
    assert [after[worker] - before.get(worker, 0) for worker in ("0", "1")] == [2, 1]
    text = httpx.get(f"{gateway.url}/metrics").text
    assert "turngate_workers 2" in text
    assert text.count("# TYPE turngate_turns_total ") == 1
    assert httpx.get(f"{gateway.url}/readyz").json() == {"ready": True, "missing": []}


def counted(gateway: GatewayProcess) -> dict[str, int]:
    """First turns by worker, from the metrics of the main port."""
    text = httpx.get(f"{gateway.url}/metrics").text
    found = re.findall(r'^turngate_turns_total\{worker="(\d)",kind="first"\} (\d+)$', text, re.MULTILINE)
    return {worker: int(count) for worker, count in found}


def test_a_store_of_two_workers_is_read_by_one_once_nothing_is_open_on_the_other(
    start_fake: StartFake, start_gateway: StartGateway
) -> None:
    fake = start_fake(["Fine."])
    gateway = start_gateway(fake.url, *TWO)
    created = [gateway.session(group="g", group_size=2) for _ in range(2)]
    for _, client in created:
        say(client)
    gateway.stop()
    with pytest.raises(RuntimeError, match="start with --workers 2"):
        start_gateway(fake.url)
    gateway.start()
    for one, client in created:
        say(client)
        gateway.client.finish_rollout(one.id, wire.FinishRollout(reward=1.0))
    gateway.stop()
    alone = start_gateway(fake.url)
    (group,) = alone.client.lease(wire.NewLease(policy="policy")).groups
    assert [len(rollout.rows) > 0 for rollout in group.rollouts] == [True, True]
    assert alone.client.rollout(created[1][0].id).turns == 2


def test_a_worker_that_cannot_open_its_file_says_why_in_a_line(
    start_fake: StartFake, start_gateway: StartGateway
) -> None:
    gateway = start_gateway(start_fake(["Fine."]).url, *TWO)
    gateway.stop()
    gateway.log.unlink()
    with sqlite3.connect(gateway.store / "turns-1.sqlite") as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(RuntimeError, match="worker 1 ended at its start; its log is above"):
        gateway.start()
    lines = gateway.log.read_text().splitlines()
    (why,) = [json.loads(line) for line in lines if "schema 99" in line]
    assert (why["event"], why["worker"]) == ("worker_start_failed", 1)
    assert "use the release that wrote it" in why["error"]
    assert not [line for line in lines if "Traceback" in line]
