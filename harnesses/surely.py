"""Ending something for certain: work that goes to its end however often the one who waits for it is cancelled.

A shielded await ends early at the second cancellation while the work goes on behind its back; here the cancellation is
raised only after the work is done. It must bound its own time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def surely(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; when cancelled meanwhile, raises that after `work` has ended."""
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
    return task.result()
