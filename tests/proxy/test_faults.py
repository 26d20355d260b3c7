"""What happens when something ends at the wrong moment: a rollout, a client, an engine, an adapter, the gateway."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.fake_engine.settings import FakeSettings
from tests.gateway_process import GatewayProcess, free_port
from tests.proxy.conftest import Gate, StartFake, StartGateway
from turngate.proxy import wire

SLOW = FakeSettings(tokens_per_s=20.0)
BODY = {"messages": [{"role": "user", "content": "Hi"}]}
FIRST_TRY = {"x-stainless-retry-count": "0"}


def wait_for(condition: Callable[[], object], limit_s: float = 30) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def post(url: str, headers: dict[str, str] | None = None) -> httpx.Response:
    return httpx.post(f"{url}/chat/completions", json=BODY, headers=headers, timeout=60)


def adapter(folder: Path) -> wire.PublishAdapter:
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    return wire.PublishAdapter(policy="policy", path=str(folder), step=1)


def test_finishing_a_rollout_ends_the_turn_being_sampled_and_its_generation(
    start_fake: StartFake, start_gateway: StartGateway
) -> None:
    fake = start_fake(None, settings=SLOW)
    gateway = start_gateway(fake.url)
    created, _ = gateway.session()
    url = f"{created.base_url}/chat/completions"
    with httpx.stream("POST", url, json={**BODY, "stream": True}, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        gateway.client.finish_rollout(created.id, wire.FinishRollout(reward=1.0))
        rest = [line for line in lines if line]
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "session_closed"
    assert wait_for(lambda: fake.engine.aborted == 1)
    assert gateway.client.rollout(created.id).turns == 0
    assert post(created.base_url).status_code == 410


def test_same_requests_at_once_that_say_they_are_no_retries_are_separate_samples_of_one_tree(
    start_fake: StartFake, start_gateway: StartGateway
) -> None:
    fake = start_fake(["Hello there, my friend."], settings=SLOW)
    gateway = start_gateway(fake.url)
    created, _ = gateway.session()
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: post(created.base_url, FIRST_TRY).status_code, range(6)))
    assert answers == [200] * 6
    info = gateway.client.rollout(created.id)
    assert (info.turns, info.breaks) == (6, 0)
    gateway.stop()
    command = [sys.executable, "-m", "turngate.proxy.cli", "verify", str(gateway.store)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_a_body_that_ends_halfway_leaves_the_session_and_the_log_alone(gate: Gate) -> None:
    gateway = gate.says(["Hello."])
    created, _ = gateway.session()
    before = gateway.log.read_text().count('"trace"')
    head = f"POST /s/{created.api_key}/v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99\r\n\r\n{{"
    with socket.create_connection(("127.0.0.1", gateway.port)) as half:
        half.sendall(head.encode())
    assert wait_for(lambda: 'code="client_gone"' in httpx.get(f"{gateway.url}/metrics").text)
    assert post(created.base_url).status_code == 200
    assert gateway.log.read_text().count('"trace"') == before


def test_an_engine_that_forgot_its_adapters_gets_them_again(
    start_fake: StartFake, start_gateway: StartGateway, tmp_path: Path
) -> None:
    fake = start_fake(["Hello."])
    gateway = start_gateway(fake.url)
    gateway.client.publish_adapter(adapter(tmp_path / "lora"))
    created, _ = gateway.session()
    assert post(created.base_url).status_code == 200
    fake.engine.adapters.clear()  # as a restart between two health checks does
    assert post(created.base_url).status_code == 200
    assert len(fake.engine.adapters) == 1


def test_a_gateway_starts_although_an_adapter_of_before_is_gone(
    start_fake: StartFake, start_gateway: StartGateway, tmp_path: Path
) -> None:
    fake = start_fake(["Hello."])
    gateway = start_gateway(fake.url)
    gateway.client.publish_adapter(adapter(tmp_path / "lora"))
    gateway.stop()
    fake.engine.adapters.clear()
    shutil.rmtree(tmp_path / "lora")
    gateway.start()
    assert gateway.client.policy("policy").version == 0
    assert post(gateway.session()[0].base_url).status_code == 200


def test_finished_sessions_no_longer_count_where_they_were(start_fake: StartFake, start_gateway: StartGateway) -> None:
    fakes = [start_fake(["Hello."]) for _ in range(2)]
    gateway = start_gateway(fakes[0].url, "--engine", fakes[1].url)

    def served(url: str) -> int:
        before = fakes[0].engine.generations
        assert post(url).status_code == 200
        return 0 if fakes[0].engine.generations > before else 1

    sessions = [gateway.session()[0] for _ in range(3)]
    assert [served(created.base_url) for created in sessions] == [0, 1, 0]
    for created in (sessions[0], sessions[2]):
        gateway.client.finish_rollout(created.id, wire.FinishRollout(reward=0.0))
    assert [served(gateway.session()[0].base_url) for _ in range(2)] == [0, 0]


def test_a_gateway_that_still_waits_for_its_engine_ends_when_told_to(tmp_path: Path) -> None:
    gateway = GatewayProcess(f"http://127.0.0.1:{free_port()}", tmp_path / "store")
    with gateway.log.open("wb") as log:
        process = subprocess.Popen(gateway._command, stdout=log, stderr=log)
    try:
        assert wait_for(lambda: (gateway.store / "admin.key").exists())
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)
    finally:
        process.kill()


def test_a_damaged_rollout_does_not_stop_the_leasing_of_others(gate: Gate) -> None:
    gateway = gate.says(["Hello."])
    sessions = [gateway.session(group="damaged", group_size=3)[0] for _ in range(3)]
    for i, created in enumerate(sessions):
        assert post(created.base_url).status_code == 200
        gateway.client.finish_rollout(created.id, wire.FinishRollout(reward=float(i)))
    with sqlite3.connect(gateway.store / "turns-0.sqlite") as turns:
        turns.execute("UPDATE turns SET request = x'07' WHERE rollout = ?", (sessions[0].id,))
    (group,) = gateway.client.lease(wire.NewLease(policy="policy")).groups
    assert [(one.outcome, one.cause, len(one.rows)) for one in group.rollouts] == [
        ("unscorable", "store_damaged", 0),
        ("scored", None, 1),
        ("scored", None, 1),
    ]
