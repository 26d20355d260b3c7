"""The worker processes of a gateway: started, watched, started again when one dies, and ended.

A worker's listener is held here, so its port outlives it and connections wait for its successor. The fleet knows
processes and ports only; what a worker is asked goes through `RemoteLink`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import sys
from typing import Self

import httpx

from turngate.proxy.drain import Drain
from turngate.proxy.engines import Found
from turngate.proxy.errors import WorkerAway
from turngate.proxy.settings import GatewaySettings
from turngate.proxy.store.layout import StoreFolder
from turngate.proxy.store.turn_files import TurnFiles
from turngate.proxy.workers.ports import worker_listeners
from turngate.proxy.workers.remote import RemoteLink
from turngate.proxy.workers.start import Start

log = logging.getLogger("turngate.workers")

PAUSES_S = (0.0, 0.2, 1.0, 5.0)
"""Before a worker is started again: at once, then slower while it does not come up."""

DRAIN_S = 35.0
"""How long a worker may finish its turns at the end; a little above uvicorn's own limit."""


class Fleet:
    """Built by `start`, ended by `stop`."""

    def __init__(self, settings: GatewaySettings, listeners: list[socket.socket], turns: TurnFiles) -> None:
        key = secrets.token_hex(24)
        self.http = httpx.AsyncClient(
            trust_env=False,
            timeout=httpx.Timeout(600.0, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=2.0),
        )
        self.front = settings.front or settings.public_url is not None
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(listeners[0].getsockname()[0], "")
        self.links = []
        self._workers = []
        for number, listener in enumerate(listeners):
            at, port = listener.getsockname()[:2]
            url = f"http://{host or (f'[{at}]' if ':' in at else at)}:{port}"
            worker = _Worker(number, listener, key, settings)
            self._workers.append(worker)
            self.links.append(RemoteLink(number, url, key, turns, self.http, front=self.front, ended=worker.ended.done))

    @classmethod
    async def start(
        cls,
        settings: GatewaySettings,
        folder: StoreFolder,
        found: Found,
        turns: TurnFiles,
        main_port: int,
        drain: Drain,
    ) -> Self:
        """Start all workers and wait until they serve; when `drain` begins they drain too, and count as in flight.

        Raises:
            WorkerAway: one ended at its start; the log says why.
        """
        behind_front = settings.front or settings.public_url is not None
        host = "127.0.0.1" if behind_front else settings.host
        listeners = await asyncio.to_thread(worker_listeners, folder, host, main_port, settings.workers)
        self = cls(settings, listeners, turns)
        try:
            await asyncio.gather(*(worker.start(found) for worker in self._workers))
        except BaseException:
            await self.stop()
            raise
        drain.when_begun(lambda: self._terminate(drain))
        return self

    def down(self) -> list[int]:
        """Workers that do not serve now."""
        return [worker.number for worker in self._workers if not worker.up.is_set()]

    @property
    def restarts(self) -> int:
        """How often a worker had to be started again."""
        return sum(worker.restarts for worker in self._workers)

    async def stop(self) -> None:
        """Let all workers finish their turns, then end them."""
        await asyncio.gather(*(worker.stop() for worker in self._workers))
        await self.http.aclose()

    def _terminate(self, drain: Drain) -> None:
        for worker in self._workers:
            drain.enter()
            worker.ended.add_done_callback(lambda _: drain.leave())
            worker.terminate()


class _Worker:
    """One worker's process, whichever it is now."""

    def __init__(self, number: int, listener: socket.socket, key: str, settings: GatewaySettings) -> None:
        self.number = number
        self.up = asyncio.Event()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.restarts = 0
        self._listener = listener
        self._key = key
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self._stopping = False

    async def start(self, found: Found) -> None:
        """Start it for the first time.

        Raises:
            WorkerAway: it ended instead of serving.
        """
        self._found = found
        if not await self._launch():
            raise WorkerAway(f"worker {self.number} ended at its start; its log is above")
        self._watch = asyncio.create_task(self._keep_up(), name=f"worker-{self.number}")

    def terminate(self) -> None:
        """Tell it to finish; see `Fleet`."""
        self._stopping = True
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()

    async def stop(self) -> None:
        """End it, gently first."""
        self.terminate()
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self._process is not None and self._process.returncode is None:
            try:
                await asyncio.wait_for(self._process.wait(), DRAIN_S)
            except TimeoutError:
                log.warning("worker_killed", extra={"worker": self.number, "why": f"not done after {DRAIN_S} s"})
                self._process.kill()
                await self._process.wait()
        self._listener.close()

    async def _keep_up(self) -> None:
        failures = 0
        while not self._stopping:
            assert self._process is not None
            status = await self._process.wait()
            self.up.clear()
            if self._stopping:
                break
            log.error("worker_died", extra={"worker": self.number, "status": status})
            await asyncio.sleep(PAUSES_S[min(failures, len(PAUSES_S) - 1)])
            if self._stopping:
                break
            self.restarts += 1
            failures = 0 if await self._launch() else failures + 1
        if not self.ended.done():
            self.ended.set_result(None)

    async def _launch(self) -> bool:
        """Start a process; whether it came to serve."""
        descriptor = self._listener.fileno()
        start = Start(self.number, self._settings, self._found, descriptor, self._key)
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "turngate.proxy.workers.process"),
                stdin=asyncio.subprocess.PIPE,
                pass_fds=(descriptor,),
                start_new_session=True,
            )
        except OSError as error:  # no memory or no process for now: tried again like one that ended at once
            log.error("worker_not_started", extra={"worker": self.number, "error": str(error)})
            return False
        self._process = process
        assert process.stdin is not None
        process.stdin.write(start.packed())
        serves = asyncio.create_task(self._serves())
        ended = asyncio.create_task(process.wait())
        await asyncio.wait({serves, ended}, return_when=asyncio.FIRST_COMPLETED)
        for task in (serves, ended):
            task.cancel()
        await asyncio.gather(serves, ended, return_exceptions=True)
        if process.returncode is not None:
            return False
        self.up.set()
        return True

    async def _serves(self) -> None:
        """Return once it answers: until then the question waits in the listener's queue."""
        host, port = self._listener.getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        url = f"http://[{host}]:{port}/healthz" if ":" in host else f"http://{host}:{port}/healthz"
        async with httpx.AsyncClient(trust_env=False, timeout=None) as http:
            while True:
                try:
                    await http.get(url)
                    return
                except httpx.HTTPError:
                    await asyncio.sleep(0.05)
