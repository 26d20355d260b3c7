"""All engines as one session sees them: calls that survive the engine they were made to.

Render and derender are pure, so they are simply made again elsewhere. A generation goes on from its tokens so far.
It must never give a token twice, never hide which engine sampled what, and never try for ever.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from turngate.proxy.engine.continuation import Decode, SeamStops, Stretch, already_over, continued, obstacle
from turngate.proxy.engine.errors import EngineBusy, EngineError, EngineFault, EngineRefused, EngineUnavailable
from turngate.proxy.engine.replica import Derender, Replica
from turngate.proxy.engine.replicas import Replicas
from turngate.proxy.engine.text_ahead import TextAhead
from turngate.proxy.engine.types import Chunk, GenerateCall, Rendered
from turngate.proxy.engine.wire import Delta, State, clean_delta
from turngate.proxy.turns import IntArray

_log = logging.getLogger("turngate.failover")
_T = TypeVar("_T")

MAX_FAILURES = 5
"""How often one call is made again: a request that kills engines must not kill all of them for ever."""

_PAUSE_S = 0.2
"""Before a call is made again to the engine that just failed it, because there is no other; grows with each failure."""

Count = Callable[[str, str], None]
"""`(metric, engine)`: one more."""


@dataclass(frozen=True, slots=True)
class Failover:
    """How sessions reach the engines.

    `wait_s`: how long a call waits for an engine when there is none. `decode`: the tokenizer's, for stop strings
    that cross a seam; None where there is none. `ends`: ids that end a turn. `count`: where events are counted.
    """

    replicas: Replicas
    wait_s: float
    decode: Decode | None
    ends: frozenset[int]
    count: Count

    def of(self, session: str) -> SessionEngines:
        """The engines for one turn of a session."""
        return SessionEngines(self, session)


class SessionEngines:
    """The engines for one turn. `engine` names the one that answered last, `stretches` who sampled what."""

    def __init__(self, failover: Failover, session: str) -> None:
        self._failover = failover
        self._replicas = failover.replicas
        self._session = session
        self.engine = ""
        self.stretches: tuple[Stretch, ...] = ()

    async def render(self, body: Mapping[str, Any]) -> Rendered:
        """See `Replica.render`."""
        return await self._anywhere(lambda replica: replica.render(body))

    def derenderer(
        self, model: str, request_id: str, chat_request: Mapping[str, Any], prompt_ids: IntArray
    ) -> Derender:
        """See `Replica.derenderer`; any engine may go on where another one stopped: the state is in the call."""

        async def call(ids: Sequence[int], finish: str | None, state: State | None) -> tuple[Delta, State]:
            return await self._anywhere(
                lambda replica: replica.derenderer(model, request_id, chat_request, prompt_ids)(ids, finish, state)
            )

        return call

    def text_ahead(self, prompt_ids: IntArray) -> TextAhead | None:
        """See `Replica.text_ahead`; None where one of the engines cannot do without derender."""
        found = [replica.text_ahead(prompt_ids) for replica in self._replicas.all]
        return found[0] if all(found) else None

    async def generate(self, call: GenerateCall) -> AsyncGenerator[Chunk, None]:
        """One answer, whatever becomes of the engines: the last chunk has a finish reason. See `Replica.generate`.

        Raises:
            EngineRefused, ContextOverflow: the request is at fault.
            EngineBusy: all is full for longer than a turn may wait.
            EngineUnavailable, EngineFault: no engine could give the answer, or it cannot be gone on with.
        """
        ids: list[int] = []
        failures = _Failures(self)
        seam: SeamStops | None = None
        now = call
        while True:
            replica = await failures.replica()
            start = len(ids)
            try:
                async with (
                    self._replicas.gate(replica).turn(),
                    aclosing(replica.generate(now)) as chunks,
                ):
                    self.engine = replica.name
                    async for chunk in chunks:
                        if seam is not None and seam.open:
                            chunk = seam.cut(chunk)
                        ids.extend(chunk.ids)
                        self._note(replica, start, len(ids))
                        yield chunk
                        if chunk.finish_reason is not None:
                            return
            except EngineError as error:
                await failures.met(replica, error)
            over = already_over(call.sampling_params, ids, self._failover.ends)
            if over is not None:
                yield over
                return
            if len(ids) > start:
                seam = await self._seam(call, ids)
                now = continued(call, ids)

    async def chat_stream(self, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """See `Replica.chat_stream`: made again elsewhere only before its first token, since its prompt is not ours.

        Raises:
            EngineError: as `generate`.
        """
        failures = _Failures(self)
        while True:
            replica = await failures.replica()
            started = False
            try:
                async with (
                    self._replicas.gate(replica).turn(),
                    aclosing(replica.chat_stream(body)) as events,
                ):
                    self.engine = replica.name
                    async for event in events:
                        started = started or _says_something(event)
                        yield event
                    return
            except EngineError as error:
                if started:
                    await self._replicas.suspect(replica)
                    raise
                await failures.met(replica, error)

    async def _anywhere(self, work: Callable[[Replica], Awaitable[_T]]) -> _T:
        """What `work` gives, from the session's replica or, where that fails, from another."""
        failures = _Failures(self)
        while True:
            replica = await failures.replica()
            try:
                return await work(replica)
            except EngineError as error:
                await failures.met(replica, error)

    async def _seam(self, call: GenerateCall, ids: Sequence[int]) -> SeamStops | None:
        """What must be looked after where the answer goes on. Raises EngineFault where it cannot go on."""
        what = obstacle(call)
        params = call.sampling_params
        stop = params.get("stop") or ()
        decode = self._failover.decode if stop and what is None else None
        if what is None and stop and decode is None:
            what = "stop strings without a tokenizer"
        if what is not None:
            raise EngineFault(f"the engine died midway, and an answer with {what} cannot be gone on with elsewhere")
        self._failover.count("turngate_continuations_total", self.engine)
        if decode is None:
            return None
        return SeamStops(
            (stop,) if isinstance(stop, str) else stop,
            decode,
            ids,
            min_tokens=params.get("min_tokens") or 0,
            skip_special=params.get("skip_special_tokens", True),
        )

    def _note(self, replica: Replica, start: int, end: int) -> None:
        if start == 0:  # the usual case: one engine from the beginning
            self.stretches = (Stretch(0, end, replica.name),) if end else ()
            return
        before = tuple(one for one in self.stretches if one.end <= start)
        self.stretches = (*before, Stretch(start, end, replica.name)) if end > start else before


def _says_something(event: Mapping[str, Any]) -> bool:
    """Whether an event of a chat completion has a part of the answer: the first one only names the role."""
    return any(
        choice.get("token_ids") or choice.get("finish_reason") or clean_delta(choice.get("delta"))
        for choice in event.get("choices") or ()
    )


class _Failures:
    """The failures of one call, and where it is made next."""

    def __init__(self, engines: SessionEngines) -> None:
        self._engines = engines
        self._avoid: set[str] = set()
        self._lost: set[str] = set()
        self._met = 0

    async def replica(self) -> Replica:
        """The replica to try now: the session's own, where it has not just failed; waits for one if there is none.

        Raises:
            EngineUnavailable: none came within the limit.
        """
        replicas, session = self._engines._replicas, self._engines._session
        if not replicas.healthy:
            await replicas.wait_for_any(self._engines._failover.wait_s)
        if self._avoid >= {replica.name for replica in replicas.healthy}:
            await asyncio.sleep(_PAUSE_S * self._met)
            self._avoid.clear()
            return await self.replica()
        return replicas.pick(session, exclude=self._avoid)

    async def met(self, replica: Replica, error: EngineError) -> None:
        """Take note of a failure; raises it where there is no use in another try."""
        replicas = self._engines._replicas
        if isinstance(error, EngineBusy):
            self._avoid.add(replica.name)
            if self._avoid >= {one.name for one in replicas.healthy}:
                raise error
            return
        lost = isinstance(error, EngineRefused) and error.status == 404  # a restarted engine without its adapters
        if not (lost or isinstance(error, EngineUnavailable | EngineFault)) or (lost and replica.name in self._lost):
            raise error
        self._met += 1
        about = {"engine": replica.name, "url": replica.url, "failures": self._met, "error": str(error)}
        _log.warning("engine_failed", extra=about)
        self._engines._failover.count("turngate_failovers_total", replica.name)
        await replicas.suspect(replica)
        if self._met >= MAX_FAILURES:
            raise error
        (self._lost if lost else self._avoid).add(replica.name)
