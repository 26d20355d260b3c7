"""uvicorn's server without its ten looks a second at whether it is to end: told to end, it wakes at once.

An idle gateway wakes the less for it. How requests are served is uvicorn's alone.
"""

from __future__ import annotations

import asyncio

import uvicorn

TICK_S = 1.0
"""How often the date in the answers' heads moves on."""


class Server(uvicorn.Server):
    """As uvicorn's; `look` makes it tick at once, which signal handlers and other threads may ask for, too.

    `tick_s` is the time between two ticks, for who needs more of them.
    """

    tick_s = TICK_S

    def __init__(self, config: uvicorn.Config) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news: asyncio.Event | None = None
        self._ends = False
        super().__init__(config)

    @property
    def should_exit(self) -> bool:
        """Whether it is to end, see `uvicorn.Server`."""
        return self._ends

    @should_exit.setter
    def should_exit(self, ends: bool) -> None:
        self._ends = ends
        self.look()

    def look(self) -> None:
        """Tick now instead of within `tick_s`."""
        if self._loop is not None and self._news is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._news.set)

    async def main_loop(self) -> None:
        """Tick now and then, and whenever there is news, until it is to end."""
        self._loop, self._news = asyncio.get_running_loop(), asyncio.Event()
        while not await self.on_tick(0):
            self._news.clear()
            if self.should_exit:  # said during that tick
                continue
            timer = self._loop.call_later(self.tick_s, self._news.set)
            await self._news.wait()
            timer.cancel()
