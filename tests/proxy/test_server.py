"""The server ticks rarely, and still ends at once when it is told to, from a thread or a signal handler."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import uvicorn

from turngate.proxy.server import Server


async def _app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def _server() -> Server:
    return Server(uvicorn.Config(_app, log_level="warning", lifespan="off"))


async def test_told_by_another_thread_it_ends_without_waiting_for_its_tick() -> None:
    server = _server()
    server.tick_s = 3600.0
    listener = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(server._serve([listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    assert not serving.done()
    threading.Thread(target=lambda: setattr(server, "should_exit", True)).start()
    await serving


async def test_told_before_it_runs_it_does_not_begin() -> None:
    server = _server()
    server.should_exit = True
    await server.main_loop()


async def test_a_look_makes_it_tick() -> None:
    server = _server()
    server.tick_s = 3600.0
    ticks = 0

    async def on_tick(counter: int) -> bool:
        nonlocal ticks
        ticks += 1
        return ticks == 3

    server.on_tick = on_tick  # type: ignore[method-assign]
    running = asyncio.create_task(server.main_loop())
    for seen in (1, 2):
        while ticks < seen:
            await asyncio.sleep(0)
        server.look()
    await running
