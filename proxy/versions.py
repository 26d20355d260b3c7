"""Which adapter version a turn means, as the process that serves the turn sees it, and which versions it is using.

The control store is the one truth: a version is named only while its row says live, so one commit there is seen by
every process at once. It decides nothing; `policies.py` publishes and retires.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from turngate.proxy.errors import EngineTrouble, NotFound
from turngate.proxy.store.control import ControlStore


class Versions:
    """The live versions, read again when the store has changed, and the turns in flight by version."""

    def __init__(self, control: ControlStore, *, base_model: str, names: frozenset[str]) -> None:
        self._control = control
        self._base_model = base_model
        self._names = names
        self._seen = -1
        self._current: dict[str, int] = {}
        self._live: dict[tuple[str, int], tuple[str, str]] = {}
        self._turns: Counter[tuple[str, int]] = Counter()
        self._left = asyncio.Event()

    def current(self, policy: str) -> int:
        """The version that new rollouts, and turns that follow the newest, get; 0 is the base.

        Raises:
            NotFound: the gateway does not serve this policy.
        """
        if policy not in self._names:
            raise NotFound(f"policy {policy!r} is not served here; known: {', '.join(sorted(self._names))}")
        self._read()
        return self._current.get(policy, 0)

    def model_name(self, policy: str, version: int) -> tuple[str, str | None]:
        """`(engine model name, adapter name or None)` of a version.

        Raises:
            EngineTrouble: the version is not loaded any more.
        """
        if version == 0:
            return self._base_model, None
        self._read()
        live = self._live.get((policy, version))
        if live is None:
            raise EngineTrouble(f"version {version} of {policy} is not loaded any more; finish this rollout")
        return live[0], live[0]

    def adapters(self) -> dict[str, str]:
        """Name and folder of every adapter that turns may name: what an engine must have."""
        self._read()
        return dict(self._live.values())

    def pin(self, policy: str, version: int) -> None:
        """A turn in flight uses this version."""
        self._turns[policy, version] += 1

    def unpin(self, policy: str, version: int) -> None:
        """It does no more."""
        self._turns[policy, version] -= 1
        if self._turns[policy, version] <= 0:
            del self._turns[policy, version]
            self._left.set()

    async def naming(self, policy: str, version: int, wait_s: float = 0.0) -> int:
        """How many turns in flight use a version; waits up to `wait_s` for them to end."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + wait_s
        while self._turns[policy, version] and (left_s := deadline_s - loop.time()) > 0:
            self._left.clear()
            try:
                await asyncio.wait_for(self._left.wait(), left_s)
            except TimeoutError:
                break
        return self._turns[policy, version]

    def refresh(self) -> None:
        """Read the store again at the next question: this process has just changed it itself."""
        self._seen = -1

    def _read(self) -> None:
        seen = self._control.data_version()
        if seen == self._seen:
            return
        self._seen = seen
        self._current, self._live = self._control.served()
