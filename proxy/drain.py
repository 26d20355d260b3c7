"""Ending without losing a turn: the first signal stops new turns, those in flight are finished, then the server ends.

Until they are, the server stays up, so that agents get a 503 that says when to ask again instead of a closed port, and
runners can finish their rollouts. A second signal ends at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from types import FrameType

from turngate.proxy.errors import Draining
from turngate.proxy.server import Server

log = logging.getLogger("turngate.drain")

LOOK_S = 0.1
"""How often a drain is looked at."""

CUT_S = 1
"""How long the server waits for turns that did not end within the drain's limit, after it has cancelled them."""


class Drain:
    """How many turns are in flight, and whether new ones are taken. The event loop is the only user."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.draining = False
        self._told: list[Callable[[], None]] = []

    def check(self) -> None:
        """Raises Draining once `begin` was called."""
        if self.draining:
            raise Draining("this gateway is ending and takes no new turns; ask again, here or at another")

    def enter(self) -> None:
        """Count a turn in."""
        self.in_flight += 1

    def leave(self) -> None:
        """Count a turn out."""
        self.in_flight -= 1

    def begin(self) -> None:
        """Take no more turns."""
        self.draining = True
        for tell in self._told:
            tell()

    def when_begun(self, tell: Callable[[], None]) -> None:
        """Call `tell` when draining begins: others must drain with this one."""
        self._told.append(tell)


def drain_before_end(server: Server, drain: Callable[[], Drain], limit_s: float) -> None:
    """Make `server` drain on its first SIGTERM or SIGINT, for at most `limit_s`, and end at once on a second."""
    end, tick = server.handle_exit, server.on_tick
    asked: list[tuple[int, float]] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if not server.started or asked:
            server.force_exit = server.started
            end(number, frame)
            return
        asked.append((number, time.monotonic() + limit_s))
        turns = drain().in_flight  # before `begin`, which counts in workers that end
        drain().begin()
        server.tick_s = LOOK_S
        server.look()
        if turns:
            log.warning("draining", extra={"turns_in_flight": turns, "limit_s": limit_s})

    async def on_tick(counter: int) -> bool:
        if asked and not server.should_exit:
            number, deadline_s = asked[0]
            late = time.monotonic() >= deadline_s
            if late and drain().in_flight:
                log.warning("turns_cut", extra={"turns_in_flight": drain().in_flight, "limit_s": limit_s})
                server.config.timeout_graceful_shutdown = CUT_S
            if late or not drain().in_flight:
                end(number, None)
        return await tick(counter)

    server.handle_exit = handle  # type: ignore[method-assign, assignment]
    server.on_tick = on_tick  # type: ignore[method-assign]
