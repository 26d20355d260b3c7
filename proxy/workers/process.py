"""A worker process: serves agents on a socket it inherited, and ends when the control process does.

Everything it is told comes over its standard input, which stays open: its end is the end of the control process,
however that ended. So no key is in a process's arguments or environment, and no worker is left over.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from fastapi import FastAPI

from turngate.proxy import agent_routes, gemini_routes
from turngate.proxy.app import new_app
from turngate.proxy.clock import SteadyUtc
from turngate.proxy.drain import drain_before_end
from turngate.proxy.engine.errors import EngineError
from turngate.proxy.engines import Engines
from turngate.proxy.errors import GatewayRefusal
from turngate.proxy.gateway import Gateway, open_tracer
from turngate.proxy.logs import setup_logs
from turngate.proxy.metrics import Metrics
from turngate.proxy.serve import mute_failed_start, server_config
from turngate.proxy.server import Server
from turngate.proxy.store.control import ControlStore
from turngate.proxy.store.errors import StoreBusy, StoreError
from turngate.proxy.store.layout import StoreFolder
from turngate.proxy.store.turnstore import TurnStore
from turngate.proxy.versions import Versions
from turngate.proxy.vitals import settle_garbage
from turngate.proxy.workers import internal
from turngate.proxy.workers.start import Start, told

log = logging.getLogger("turngate.workers")

PREDECESSOR_S = 10.0
"""How long the turn file may still be locked by a worker that was killed just now."""


def build_worker_app(start: Start) -> FastAPI:
    """The application of one worker: the agents' routes, and those of the control process."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            try:
                gateway = await _open(start, stack)
            except (EngineError, GatewayRefusal, StoreError, OSError) as error:
                app.state.failure = str(error)
                raise
            app.state.gateway = app.state.serving = gateway
            settle_garbage()
            yield

    app = new_app(lifespan)
    app.state.internal_key = start.key
    agent_routes.add_agent_routes(app)
    app.include_router(gemini_routes.router)
    app.include_router(internal.router)
    return app


async def _open(start: Start, stack: AsyncExitStack) -> Gateway:
    """What serves agents here; `stack` closes it.

    Raises:
        EngineError, GatewayRefusal, StoreError, OSError: a part of it cannot be opened.
    """
    settings, folder = start.settings, StoreFolder(start.settings.store)
    control = stack.enter_context(ControlStore(folder.control, readonly=True))
    turns = stack.enter_context(_own_turns(folder, start))
    model = next(one.model for one in start.found.replicas if one is not None)
    versions = Versions(control, base_model=model, names=settings.policies)
    metrics = Metrics()
    engines = await Engines.adopt(settings, folder, metrics, start.found, versions.adapters)
    stack.push_async_callback(engines.close)
    tracer = open_tracer(settings.otel, folder.run)
    if tracer is not None:
        stack.push_async_callback(asyncio.to_thread, tracer.close)
    gateway = Gateway(
        settings,
        worker=start.worker,
        control=control,
        turns=turns,
        engines=engines,
        versions=versions,
        metrics=metrics,
        utc_ns=SteadyUtc(),
        tracer=tracer,
    )
    stack.push_async_callback(gateway.close)
    return gateway


def main() -> int:
    """Serve until SIGTERM, or until the control process is gone."""
    start = told(sys.stdin.buffer)
    threading.Thread(target=_end_with_control, name="control-watch", daemon=True).start()
    setup_logs(start.settings.log_level, start.settings.log_format)
    for handler in logging.getLogger().handlers:
        handler.addFilter(lambda record: bool(record.__dict__.setdefault("worker", start.worker)) or True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # until uvicorn takes it over, and when it raises it again
    app = build_worker_app(start)
    server = Server(server_config(app, start.settings))
    drain_before_end(server, lambda: app.state.gateway.drain, start.settings.drain_s)
    mute_failed_start(app)
    try:
        server.run(sockets=[socket.socket(fileno=start.listen_fd)])
    except SystemExit:  # uvicorn's way of saying that the start failed
        if not hasattr(app.state, "failure"):
            raise
        log.error("worker_start_failed", extra={"error": app.state.failure})
    return 0 if server.started else 1


def _end_with_control() -> None:
    """As after a kill: nothing needs to be written, since what agents saw is committed."""
    while os.read(0, 1):
        pass
    os._exit(1)


def _own_turns(folder: StoreFolder, start: Start) -> TurnStore:
    deadline_s = time.monotonic() + PREDECESSOR_S
    while True:
        try:
            return TurnStore(folder.turns(start.worker), durability=start.settings.durability)
        except StoreBusy:
            if time.monotonic() >= deadline_s:
                raise
            time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
