"""A worker in another process, over HTTP: the other end of `internal.py`.

A worker that is being restarted is waited for, since each question may be asked twice; nothing here starts or ends one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from urllib.parse import urlsplit, urlunsplit

import httpx

from turngate.proxy.errors import WorkerAway
from turngate.proxy.links import Closed
from turngate.proxy.store.errors import StoreDamaged
from turngate.proxy.store.records import Seal
from turngate.proxy.store.turn_files import TurnFiles
from turngate.proxy.store.turnstore import TurnCounts
from turngate.proxy.workers.internal import KEY_HEADER, ClosedSession, Counts, Idle, TurnsInFlight

log = logging.getLogger("turngate.workers")

RESTART_WAIT_S = 60.0
ASK_S = 5.0


class RemoteLink:
    """One worker at `url`; see `Link`.

    Args:
        front: agents reach it through the main port only.
        ended: whether it has ended for good, and nothing can be added to its file any more.
    """

    def __init__(
        self,
        worker: int,
        url: str,
        key: str,
        turns: TurnFiles,
        http: httpx.AsyncClient,
        *,
        front: bool,
        ended: Callable[[], bool],
    ) -> None:
        self.worker = worker
        self.url = url
        self._headers = {KEY_HEADER: key}
        self._turns = turns
        self._http = http
        self._front = front
        self._ended = ended

    async def close_session(self, rollout: str) -> Closed:
        """See `Link`; what the worker says it has committed is compared with its file.

        Raises:
            WorkerAway: it did not answer within a minute.
            StoreDamaged: its file holds something else.
        """
        deadline_s = time.monotonic() + RESTART_WAIT_S
        while True:
            try:
                answer = await self._ask("POST", f"/internal/sessions/{rollout}/close", RESTART_WAIT_S)
                break
            except httpx.TransportError as error:
                if self._ended():
                    return Closed(self._turns.seal(self.worker, rollout), ())
                if time.monotonic() >= deadline_s:
                    raise WorkerAway(
                        f"worker {self.worker} could not close the session of {rollout} ({error!r}); try again"
                    ) from error
            await asyncio.sleep(0.1)
        told = ClosedSession.model_validate_json(answer.content)
        seal = self._turns.seal(self.worker, rollout)
        if (seal.turns, seal.digest.hex()) != (told.turns, told.digest):
            raise StoreDamaged(
                f"worker {self.worker} has committed {told.turns} turns of {rollout}, its file holds {seal.turns} or "
                "others: nothing was finished; run turngate verify"
            )
        return Closed(Seal(told.turns, bytes.fromhex(told.digest)), told.flags)

    async def idle_s(self, rollout: str) -> float:
        """See `Link`."""
        try:
            answer = await self._ask("GET", f"/internal/sessions/{rollout}/idle", ASK_S)
        except httpx.HTTPError:
            return 0.0
        return Idle.model_validate_json(answer.content).idle_s

    async def naming(self, policy: str, version: int, wait_s: float) -> int:
        """See `Link`. A worker that has died names nothing; one that is only slow may."""
        try:
            answer = await self._ask("GET", f"/internal/naming/{policy}/{version}?wait_s={wait_s}", wait_s + ASK_S)
        except httpx.TimeoutException:
            return 1
        except httpx.TransportError:
            return 0
        return TurnsInFlight.model_validate_json(answer.content).turns

    async def counts(self) -> TurnCounts:
        """See `Link`; summed from its file while it is away."""
        try:
            answer = await self._ask("GET", "/internal/counts", ASK_S)
        except httpx.TransportError:
            return await asyncio.to_thread(self._turns.counts, self.worker)
        told = Counts.model_validate_json(answer.content)
        return TurnCounts(told.turns, told.spliced, Counter(told.breaks), told.prompt_tokens, told.completion_tokens)

    async def metrics(self) -> str:
        """See `Link`."""
        try:
            return (await self._ask("GET", "/metrics", ASK_S)).text
        except httpx.TransportError:
            return ""

    def address(self, asked_at: str) -> str:
        """See `Link`: the same host, at the worker's own port."""
        if self._front:
            return asked_at
        there = urlsplit(asked_at)
        host = f"[{there.hostname}]" if ":" in (there.hostname or "") else there.hostname
        return urlunsplit(there._replace(netloc=f"{host}:{urlsplit(self.url).port}"))

    async def _ask(self, method: str, path: str, timeout_s: float) -> httpx.Response:
        answer = await self._http.request(method, self.url + path, headers=self._headers, timeout=timeout_s)
        answer.raise_for_status()
        return answer
