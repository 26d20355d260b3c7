"""Clients that send or read too slowly: cut off in time, without memory held for them, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import httpx
import pytest
import uvicorn

from tests.conftest import FindModel
from tests.fake_engine.runner import FakeEngine
from tests.gateway_process import GatewayProcess
from tests.proxy.conftest import Gate
from turngate.proxy.slow_clients import ConnectionLimits, guarded

BODY = {"messages": [{"role": "user", "content": "Hi"}]}
OPTIONS = ("--request-timeout-s", "1", "--write-timeout-s", "1", "--max-body-bytes", "8000000")


@pytest.fixture(scope="module")
def gate(model_dir: FindModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    """A gateway with little patience."""
    store = tmp_path_factory.mktemp("gate") / "store"
    with (
        FakeEngine(model_dir("qwen-coder-0.5b"), ["Hello."]) as fake,
        GatewayProcess(fake.url, store, *OPTIONS) as gateway,
    ):
        yield Gate(fake, gateway)


def connect(gate: Gate) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", gate.gateway.port))
    client.settimeout(60)
    return client


def rest(client: socket.socket) -> bytes:
    pieces = []
    with suppress(ConnectionResetError):
        while piece := client.recv(65536):
            pieces.append(piece)
    return b"".join(pieces)


def head(secret: str, length: int) -> bytes:
    return (
        f"POST /s/{secret}/v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n".encode()
    )


def drip(client: socket.socket, first: bytes) -> None:
    """A byte at a time, for a minute."""
    client.sendall(first)
    for _ in range(1200):
        client.sendall(b" ")
        time.sleep(0.05)


@pytest.mark.parametrize("sent", [b"", b"GET", b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nx: y", b"\r\n\r\n"])
def test_a_head_that_does_not_end_is_cut_off(gate: Gate, sent: bytes) -> None:
    with connect(gate) as client:
        client.sendall(sent)
        answer = rest(client)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 408 ")


def test_a_body_that_does_not_end_is_a_408_and_costs_its_session_nothing(gate: Gate) -> None:
    created, _ = gate.says(["Hello."]).session(budgets={"max_requests": 1})
    with connect(gate) as client:
        client.sendall(head(created.api_key, 1000) + b'{"messages"')
        answer = rest(client)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"
    answered = httpx.post(f"{created.base_url}/chat/completions", json=BODY).json()
    assert answered["choices"][0]["message"]["content"] == "Hello."


def test_a_body_that_drips_is_cut_off_although_bytes_keep_coming(gate: Gate) -> None:
    created, _ = gate.says(["Hello."]).session()
    with connect(gate) as client, pytest.raises(OSError, match=r"reset|pipe"):
        drip(client, head(created.api_key, 100_000))


def test_an_unwanted_body_that_goes_on_after_its_refusal_is_cut_off(gate: Gate) -> None:
    first = b"POST /rollouts HTTP/1.1\r\nhost: localhost\r\ncontent-length: 90000\r\n\r\n"
    with connect(gate) as client, pytest.raises(OSError, match=r"reset|pipe"):
        drip(client, first)


def test_one_that_waits_for_a_slow_answer_is_not_cut_off(gate: Gate) -> None:
    created, _ = gate.says(["One two three four five six seven eight nine ten."]).session()
    quick = gate.fake.engine.settings
    gate.fake.engine.settings = replace(quick, tokens_per_s=5.0)
    try:
        answer = httpx.post(f"{created.base_url}/chat/completions", json=BODY, timeout=60)
    finally:
        gate.fake.engine.settings = quick
    assert answer.status_code == 200


async def test_a_reader_that_stops_stops_what_is_made_for_it_and_is_cut_off() -> None:
    sent_bytes = 0
    ended = asyncio.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        nonlocal sent_bytes
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": bytes(1000), "more_body": True})
            sent_bytes += 1000
            if (gone := asyncio.ensure_future(receive())) and await _done(gone):
                break
        ended.set()

    limits, refused = ConnectionLimits(10.0, 1.0, 4_000, 4_000, 10), list[str]()
    server = uvicorn.Server(
        uvicorn.Config(endless, http=guarded(limits, refused.append), lifespan="off", log_config=None)
    )
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        serving = asyncio.create_task(server.serve([listener]))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, listener.getsockname())
        await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await asyncio.wait_for(ended.wait(), 60)
        assert sent_bytes < 20_000_000
        assert refused == ["slow_reader"]
        server.should_exit = True
        await serving


async def _done(gone: asyncio.Future[Any]) -> bool:
    """Whether the client is known to be gone; asked once per piece, as the turn's own watch does beside it."""
    await asyncio.sleep(0)
    if not gone.done():
        gone.cancel()
        return False
    return bool(gone.result()["type"] == "http.disconnect")


def test_a_large_answer_that_nobody_reads_is_let_go(gate: Gate) -> None:
    gateway = gate.says(["Hello."])
    for _ in range(20):
        gateway.session(metadata={"much": "x" * 1_000_000})
    key = (gateway.store / "admin.key").read_text().strip()
    with connect(gate) as client:
        client.sendall(f"GET /rollouts HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n\r\n".encode())
        client.recv(1)
        time.sleep(3)  # the gateway's patience is 1 s
        assert len(rest(client)) < 20_000_000  # what the kernel had taken, which is less than all


def test_many_idle_connections_do_not_keep_others_out(gate: Gate) -> None:
    idle = [connect(gate) for _ in range(200)]
    try:
        assert httpx.get(f"{gate.gateway.url}/healthz").status_code == 200
        assert all(rest(client) == b"" for client in idle)
    finally:
        for client in idle:
            client.close()
