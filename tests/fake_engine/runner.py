"""Running a fake engine: in a thread of the test process, on a free port."""

from __future__ import annotations

import pathlib
import socket
import threading
import time
from types import TracebackType
from typing import Any, Self

import uvicorn

from tests.fake_engine.app import make_app
from tests.fake_engine.engine import Engine
from tests.fake_engine.script import Script
from tests.fake_engine.settings import FakeSettings, Fault
from tests.fake_engine.tokens import Tokens


class FakeEngine:
    """A fake engine at `url`, in a thread of its own.

    with FakeEngine(model_dir, script=["Hello!"]) as fake:
        ... fake.url, fake.engine.aborted, fake.fail(Fault("error"))

    Args:
        model_dir: folder with tokenizer.json, tokenizer_config.json and a chat template.
        script: what `Script.of` takes, or a Script; None for filler text.
        template: `qwen` (the model's own), `drop-reasoning`, or a file.
        settings: see `FakeSettings`.
    """

    def __init__(
        self,
        model_dir: str | pathlib.Path,
        script: Any = None,
        *,
        template: str = "qwen",
        settings: FakeSettings | None = None,
        port: int = 0,
    ) -> None:
        chosen = script if isinstance(script, Script) else Script.of(script) if script else Script()
        self.engine = Engine(Tokens(model_dir, template), chosen, settings or FakeSettings())
        self._socket = socket.create_server(("127.0.0.1", port))
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        config = uvicorn.Config(make_app(self.engine), log_level="critical", lifespan="off", access_log=False)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise RuntimeError(f"the fake engine on port {self.port} ended at once")
            time.sleep(0.005)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """Break all connections and end the thread."""
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join(timeout=10)
        self._socket.close()

    def fail(self, fault: Fault | None) -> None:
        """What goes wrong in the next generations."""
        self.engine.fault = fault

    def connections(self) -> int:
        """How many connections are open."""
        return len(self._server.server_state.connections)

    def seen(self, path: str) -> list[Any]:
        """Bodies received on `path`, in order."""
        return [body for where, body in list(self.engine.requests) if where == path]
