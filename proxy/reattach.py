"""Retries: a request that means the same as one whose answer nobody has got whole is told that answer, from its start.

Clients that time out leave and ask again; sampling anew would waste the engine and fork the tree. So a turn outlives
its client for a while. It must never answer from a turn that was delivered: the same request is then a new sample.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import orjson

from turngate.proxy.ask import Answer, Ask
from turngate.proxy.canonical import DIGEST_BYTES
from turngate.proxy.errors import EngineTrouble, GatewayRefusal

log = logging.getLogger("turngate.turns")

CONVERSATION_MARKS = frozenset(
    {
        *(b"x-session-id", b"x-parent-session-id", b"x-session-affinity"),  # OpenCode, pi
        *(b"x-claude-code-session-id", b"x-claude-code-agent-id"),
        *(b"thread-id", b"session-id"),  # Codex
        b"idempotency-key",
    }
)
"""Headers in which clients name who asks, the same in a retry: equal bodies of parallel children differ in them."""

ATTEMPT_MARKS = frozenset({b"x-stainless-retry-count"})
"""Headers in which SDKs count their retries. `0` says "not one of mine" and no more: harnesses retry on their own."""

MAX_UNHEARD = 256
"""How many turns without a client are kept at once; of more the one left longest ago is ended."""

Headers = Iterable[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Marks:
    """What the headers of a request say of it: `named` is the conversation in the client's own words (empty: none);
    `first` is whether it calls itself no retry."""

    named: bytes
    first: bool

    @classmethod
    def of(cls, headers: Headers) -> Marks:
        """Those of an ASGI scope's headers."""
        named, first = b"", False
        for name, value in headers:
            if name in CONVERSATION_MARKS:
                named += b"%s:%s\n" % (name, value)
            elif name in ATTEMPT_MARKS:
                first = value == b"0"
        return cls(named, first)


def retry_key(history: bytes, dialect: str, ask: Ask, marks: Marks) -> bytes:
    """What a request means (16 bytes): who asks, what of which model, and with which wishes.

    Left out is what clients change between attempts: whether to stream, metadata, cache marks, trace ids.

    Args:
        history: digest of messages and tools, see `HistoryIndex.key`.
    """
    rest = [dialect, ask.model, ask.render_body, ask.asked]
    written = orjson.dumps(rest, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    return blake2b(history + marks.named + b"\0" + written, digest_size=DIGEST_BYTES).digest()


@dataclass(slots=True, eq=False)
class Telling:
    """One answer being made, all of it that there is so far, and how many clients listen.

    `deltas` are the pieces of the message in order; `answer` or `refusal` is set at the end. `created_s` is UTC
    seconds, so that every client gets the same object.
    """

    turn_id: str
    created_s: int
    key: bytes
    table: Table
    home: Tellings
    deltas: list[Mapping[str, Any]] = field(default_factory=list)
    prompt_tokens: int | None = None
    answer: Answer | None = None
    refusal: GatewayRefusal | None = None
    listeners: int = 1
    work: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None
    _is_open: bool = False
    _waiting: list[asyncio.Future[None]] = field(default_factory=list)

    def opened(self, prompt_tokens: int | None) -> None:
        """The prompt stands."""
        self._is_open, self.prompt_tokens = True, prompt_tokens
        self._wake()

    def add(self, delta: Mapping[str, Any]) -> None:
        """One more piece."""
        self.deltas.append(delta)
        if self._waiting:
            self._wake()

    def finished(self, answer: Answer) -> None:
        """The answer is complete and its turn is kept."""
        self.answer = answer
        self._wake()

    def failed(self, refusal: GatewayRefusal) -> None:
        """There will be no answer; whoever asks again tries anew."""
        self.refusal = refusal
        self.forget()
        self._wake()

    def ended(self) -> None:
        """Whoever made the answer is gone; those who still listen must not wait for ever."""
        if self.answer is None and self.refusal is None:
            self.failed(EngineTrouble("the turn was cut off; ask again"))

    async def wanted(self) -> None:
        """Returns when somebody listens: an answer that nobody heard to its end is not kept."""
        while not self.listeners:
            await self._news()

    async def until_open(self) -> None:
        """Returns when the prompt stands.

        Raises:
            GatewayRefusal: as it was refused.
        """
        while not self._is_open:
            if self.refusal is not None:
                raise self.refusal
            await self._news()

    async def listen(self) -> AsyncIterator[Mapping[str, Any]]:
        """All pieces from the first on, as they come; ends when `answer` is set.

        Raises:
            GatewayRefusal: as it was refused.
        """
        told = 0
        while True:
            while told < len(self.deltas):
                told += 1
                yield self.deltas[told - 1]
            if self.refusal is not None:
                raise self.refusal
            if self.answer is not None:
                return
            await self._news()

    def join(self) -> None:
        """One more client listens."""
        self.listeners += 1
        self._heard()
        self._wake()

    def forget(self) -> None:
        """No later request is told this answer."""
        self._heard()
        same = self.table.get(self.key)
        if same is not None and self in same:
            same.remove(self)
            if not same:
                del self.table[self.key]

    def _heard(self) -> None:
        self.home.unheard.pop(self, None)
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            if not one.done():
                one.set_result(None)

    async def _news(self) -> None:
        news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(news)
        await news


Table = dict[bytes, list[Telling]]
"""The answers of one session that nobody has got whole, by `retry_key`; oldest first."""


class Tellings:
    """All answers in the making of one process. The event loop is the only user.

    Args:
        linger_s: how long one goes on after its last client left.
        given_up: called for each one that was ended before its end.
        attached: called for each request that found an answer.
    """

    def __init__(self, linger_s: float, given_up: Callable[[], None], attached: Callable[[], None]) -> None:
        self._linger_s = linger_s
        self._given_up = given_up
        self._attached = attached
        self._ending: set[asyncio.Task[None]] = set()
        self.unheard: dict[Telling, None] = {}

    def find(self, table: Table, key: bytes, marks: Marks) -> Telling | None:
        """The answer to tell a request, which then listens to it; None: it is to be sampled.

        One whose client left comes first. One whose client is still there is another request's, unless nothing says
        so: a client that names no conversation and counts its attempts from 0 wants a sample of its own.
        """
        same = table.get(key)
        if not same:
            return None
        found = next((telling for telling in same if not telling.listeners), None)
        if found is None and (marks.named or not marks.first):
            found = same[-1]
        if found is not None:
            found.join()
            self._attached()
            log.info("reattached", extra={"to_turn": found.turn_id, "pieces": len(found.deltas)})
        return found

    def begin(self, table: Table, key: bytes, turn_id: str, created_s: int) -> Telling:
        """A new answer, with one client."""
        telling = Telling(turn_id, created_s, key, table, self)
        table.setdefault(key, []).append(telling)
        return telling

    def left(self, telling: Telling, *, delivered: bool) -> None:
        """A client is gone: with the whole answer, or without."""
        telling.listeners -= 1
        if delivered:
            telling.forget()
        elif not telling.listeners and telling.refusal is None:
            self.unheard[telling] = None
            telling.timer = asyncio.get_running_loop().call_later(self._linger_s, self.give_up, telling)
            if not self._linger_s:
                self.give_up(telling)
            while len(self.unheard) > MAX_UNHEARD:
                self.give_up(next(iter(self.unheard)))

    def give_up(self, telling: Telling) -> None:
        """End an answer that nobody listens to: its generation, and what is left of it."""
        telling.forget()
        if telling.work is not None and not telling.work.done():
            self._ending.add(telling.work)
            telling.work.add_done_callback(self._ending.discard)
            telling.work.cancel()
            self._given_up()

    def give_up_all(self, table: Table) -> None:
        """End all of a session that nobody listens to: its rollout is over."""
        for telling in [one for same in table.values() for one in same if not one.listeners]:
            self.give_up(telling)

    def drain(self) -> None:
        """From now on nothing outlives its client: whoever asks again will be refused here."""
        self._linger_s = 0.0
        for telling in list(self.unheard):
            self.give_up(telling)

    async def close(self) -> None:
        """End all, and wait for it."""
        self.drain()
        await asyncio.gather(*self._ending, return_exceptions=True)
