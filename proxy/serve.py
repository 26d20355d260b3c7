"""`turngate proxy`: the gateway alone, in front of vLLM servers that are already running."""

from __future__ import annotations

import argparse
import logging
import signal
import socket
import sys
from pathlib import Path
from types import FrameType
from typing import Literal, get_args, get_origin

import uvicorn
from fastapi import FastAPI
from pydantic import ValidationError

from turngate.proxy.app import build_app
from turngate.proxy.arguments import Parser
from turngate.proxy.door import Door
from turngate.proxy.drain import drain_before_end
from turngate.proxy.hosts import allowed_names
from turngate.proxy.logs import setup_logs
from turngate.proxy.server import Server
from turngate.proxy.settings import GatewaySettings
from turngate.proxy.slow_clients import ConnectionLimits, guarded
from turngate.proxy.sockets import listen

KEEP_ALIVE_S = 75
"""How long an idle connection of an agent stays open. Agents think for longer than uvicorn's 5 s between two turns, and
one that asks just as its connection is closed sees a broken read (2 of 19,684 turns of a soak)."""

EPILOG = """\
examples:
  turngate proxy --engine http://127.0.0.1:8000 --store runs/try/store
  curl -s localhost:8400/rollouts -H "Authorization: Bearer $(cat runs/try/store/admin.key)" \\
       -H 'content-type: application/json' -d '{"task": "hello"}'

The answer holds base_url and api_key: put them where your agent has its OpenAI settings.
vLLM 0.32 needs --enable-scale-out and --logprobs-mode processed_logprobs; adapters need --enable-lora and
VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment. Without the first, sessions are `transparent`.
SIGTERM and Ctrl-C drain: turns in flight are finished, new ones get 503; a second one ends at once.
exit status: 0 stopped, 1 failed, 2 wrong usage, 130 interrupted
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    fields = GatewaySettings.model_fields
    p = Parser(
        prog="turngate proxy",
        description="Run the gateway: an OpenAI-compatible proxy that records every token of every turn.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "--engine",
        dest="engines",
        action="append",
        required=True,
        metavar="URL",
        help=f"{fields['engines'].description}; may be repeated",
    )
    for name in fields:
        if name in ("engines", "training_sampling", "allowed_hosts"):
            continue
        field = fields[name]
        default = None if field.is_required() else field.default
        choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
        words = f"{field.description}" + (f"; {' or '.join(choices)}" if choices else "")
        words += "" if default is None else f" (default: {default})"
        p.add_argument(
            f"--{name.replace('_', '-')}", required=field.is_required(), metavar="VALUE", help=words.replace("%", "%%")
        )
    p.add_argument(
        "--allow-host",
        dest="allowed_hosts",
        action="append",
        metavar="NAME",
        help=f"{fields['allowed_hosts'].description}; may be repeated".replace("%", "%%"),
    )
    return p


def proxy_command(argv: list[str]) -> int:
    """Serve until SIGTERM or SIGINT, which drain first; the exit status (0 stopped, 1 failed, 2 usage, 130 Ctrl-C)."""
    args = {key: value for key, value in vars(parser().parse_args(argv)).items() if value is not None}
    try:
        settings = GatewaySettings.model_validate(args)
    except ValidationError as error:
        for item in error.errors():
            option = str(item["loc"][0]).replace("engines", "engine").replace("_", "-")
            print(f"turngate proxy: --{option}: {item['msg']}", file=sys.stderr)
        return 2
    setup_logs(settings.log_level, settings.log_format)
    try:
        listener = listen(settings.host, settings.port)
    except OSError as error:
        print(f"turngate proxy: cannot listen on {settings.host}:{settings.port}: {error.strerror}", file=sys.stderr)
        return 1
    url = f"http://{settings.host}:{listener.getsockname()[1]}"
    app = build_app(settings, listener.getsockname()[1])
    server = Server(server_config(app, settings))
    print(f"turngate: waiting for {', '.join(settings.engines)}", file=sys.stderr)
    _announce(server, url, settings.admin_key_file or settings.store / "admin.key")
    mute_failed_start(app)
    drain_before_end(server, lambda: app.state.serving.drain, settings.drain_s)
    asked = _leave_while_waiting(server)
    signal.signal(signal.SIGTERM, _leave)  # uvicorn raises the signal again once it has shut down
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what is in the background with it ignored
    try:
        server.run(sockets=[listener])
    except SystemExit as leaving:
        if asked or not leaving.code:
            return 130 if signal.SIGINT in asked else 0
        # uvicorn's way of saying that the start failed, with a status of its own
        why = " ".join(getattr(app.state, "failure", "it did not start; the log says why").split())
        print(f"turngate proxy: {why[:500]}", file=sys.stderr)
        return 1
    return 0 if server.started else 1


def server_config(app: FastAPI, settings: GatewaySettings) -> uvicorn.Config:
    """How every process of a gateway serves: behind the door, which stands before all middleware."""

    def refused(code: str) -> None:
        """Count what no route sees; nothing is accepted before `serving` is there."""
        app.state.serving.metrics.refusal(code)

    door = Door(
        app,
        allowed_hosts=allowed_names([settings.host, *settings.allowed_hosts], settings.public_url),
        max_body_bytes=settings.max_body_bytes,
        max_concurrency=settings.max_concurrency,
        refused=refused,
    )
    return uvicorn.Config(
        door,
        http=guarded(ConnectionLimits.of(settings), refused),
        ws="none",  # nothing here speaks it, and it would leave those limits behind
        log_config=None,
        access_log=False,
        lifespan="on",
        server_header=False,
        timeout_graceful_shutdown=30,
        timeout_keep_alive=KEEP_ALIVE_S,
    )


def mute_failed_start(app: FastAPI) -> None:
    """A start that fails is told in one line at the end, not in uvicorn's and asyncio's traces as well."""

    def wanted(record: logging.LogRecord) -> bool:
        return not (hasattr(app.state, "failure") and record.name in ("uvicorn.error", "asyncio"))

    for handler in logging.getLogger().handlers:
        handler.addFilter(wanted)


def _leave(number: int, frame: object) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(0)


def _leave_while_waiting(server: Server) -> list[int]:
    """End at once on a signal before the start is complete: uvicorn itself would wait for the engines first.

    Returns a list that such signals are noted in: one that strikes in the middle of the start looks like its failure.
    """
    asked: list[int] = []
    once_started = server.handle_exit

    def handle(number: int, frame: FrameType | None) -> None:
        if not server.started:
            asked.append(number)
            _leave(number, frame)
        once_started(number, frame)

    server.handle_exit = handle  # type: ignore[method-assign, assignment]
    return asked


def _announce(server: Server, url: str, key: Path) -> None:
    """Say where it listens once it does."""
    startup = server.startup

    async def announced(sockets: list[socket.socket] | None = None) -> None:
        await startup(sockets=sockets)
        if server.started:
            print(f"turngate: ready on {url} (administration key: {key})", file=sys.stderr)

    server.startup = announced  # type: ignore[method-assign]
