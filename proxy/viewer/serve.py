"""`turngate view`: open a store, read-only, and serve its pages.

It works while the gateway writes and after it is gone. It listens on this machine only unless told otherwise, since a
store holds everything that agents and models wrote.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
import sys
import threading
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from turngate.proxy.arguments import Parser
from turngate.proxy.hosts import allowed_names
from turngate.proxy.store.errors import StoreError, StoreMissing
from turngate.proxy.viewer.app import create_app
from turngate.proxy.viewer.export import write_static
from turngate.proxy.viewer.reader import ViewerError
from turngate.proxy.viewer.store_reader import StoreFolderReader

DEFAULT_PORT = 8700
_HELP = """Browse what a run recorded: rollouts with filters, turns, messages, tokens with their log-probs, rows.

  turngate view runs/2026-01-01-demo          a run folder, live or finished
  turngate view STORE --port 0                any free port
  turngate view STORE --static OUT --rollout ID   write one rollout as HTML files instead

The store is opened read-only. Only this machine can reach the pages unless --host says otherwise."""


def parser() -> argparse.ArgumentParser:
    """The command line of `turngate view`."""
    made = Parser(prog="turngate view", description=_HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("store", type=Path, help="a store folder, or a run folder with store/ in it")
    made.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    made.add_argument("--port", type=int, default=None, help=f"default: {DEFAULT_PORT}, or a free one if it is taken")
    made.add_argument(
        "--allow-host", action="append", default=[], metavar="NAME", help="also answer to this Host name (repeatable)"
    )
    made.add_argument("--no-browser", action="store_true", help="only print the address")
    made.add_argument("--static", type=Path, metavar="DIR", help="write HTML files of --rollout to DIR, serve nothing")
    made.add_argument("--rollout", metavar="ID", help="the rollout that --static writes")
    return made


def view_command(argv: Sequence[str]) -> int:
    """Run `turngate view`: 0 stopped in good order, 1 an unreadable store, 2 no store there, 130 on Ctrl-C."""
    arguments = parser().parse_args(list(argv))
    if (arguments.static is None) != (arguments.rollout is None):
        parser().error("--static and --rollout belong together: turngate view STORE --static DIR --rollout ID")
    try:
        reader = StoreFolderReader(arguments.store)
    except StoreError as error:
        print(f"turngate view: {error}", file=sys.stderr)
        return 2 if isinstance(error, StoreMissing) else 1
    try:
        app = create_app(reader, hosts=allowed_names([_in_url(arguments.host), *arguments.allow_host]))
        if arguments.static is not None:
            files = asyncio.run(write_static(app, reader, arguments.rollout, arguments.static))
            print(f"{files} files; open {arguments.static / 'index.html'}")
            return 0
        return _serve(app, arguments)
    except (ViewerError, StoreError) as error:
        print(f"turngate view: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if arguments.static is None:
            raise
        print(f"turngate view: {arguments.static} cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    finally:
        reader.close()


def _serve(app: ASGIApp, arguments: argparse.Namespace) -> int:
    listening = _listen(arguments.host, arguments.port)
    port = listening.getsockname()[1]
    shown = "127.0.0.1" if arguments.host in ("0.0.0.0", "::") else _in_url(arguments.host)
    url = f"http://{shown}:{port}/"
    print(f"Viewer of {arguments.store}: {url}  (Ctrl-C stops it)", flush=True)
    if not arguments.no_browser:
        threading.Timer(0.5, webbrowser.open, [url]).start()
    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", server_header=False)
    server = _Server(config)
    try:
        server.run(sockets=[listening])
    except KeyboardInterrupt:
        return 130
    finally:
        listening.close()
    return 130 if server.interrupted else 0


class _Server(uvicorn.Server):
    """Notes a Ctrl-C itself: uvicorn raises it again at its end, which nobody sees where SIGINT came in as ignored."""

    interrupted = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """See uvicorn."""
        self.interrupted = self.interrupted or sig == signal.SIGINT
        super().handle_exit(sig, frame)


def _listen(host: str, port: int | None) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    wanted = [DEFAULT_PORT, 0] if port is None else [port]
    for place, number in enumerate(wanted):
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, number))
        except (OSError, OverflowError) as error:
            listening.close()
            if place == len(wanted) - 1:
                why = getattr(error, "strerror", "no such port")
                raise ViewerError(
                    f"cannot listen on {host} port {number}: {why}; choose another with --port (0: any)"
                ) from error
        else:
            listening.listen(128)  # from now on: whoever reads the URL may come before uvicorn is up
            return listening
    raise AssertionError("unreachable")


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host.lower()
