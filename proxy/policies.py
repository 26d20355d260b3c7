"""Policies: which adapter version an alias means now, which versions must stay loaded, and the flip between them.

A version is loaded on every replica before any turn may name it, and unloaded only when no open rollout and no turn in
flight can. Generation is never paused. Version numbers come from the control store and are never reused.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

from turngate.proxy import wire
from turngate.proxy.engine.errors import EngineError, EngineRefused
from turngate.proxy.engine.replicas import Replicas
from turngate.proxy.errors import BadRequest, EngineTrouble, NotFound
from turngate.proxy.store.control import ControlStore

log = logging.getLogger("turngate.policies")

Cancel = Callable[[str, int, str], Awaitable[int]]


class Policies:
    """The live versions of every policy. One lock serialises publications; turns never take it."""

    def __init__(
        self, control: ControlStore, replicas: Replicas, *, base_model: str, names: frozenset[str], max_live: int | None
    ) -> None:
        self._control = control
        self._replicas = replicas
        self._base_model = base_model
        self._names = names
        self._max_live = max_live
        self._pins: Counter[tuple[str, int]] = Counter()
        self._live: dict[tuple[str, int], wire.AdapterInfo] = {}
        self._current: dict[str, int] = dict.fromkeys(names, 0)
        self._publishing = asyncio.Lock()

    async def restore(self) -> None:
        """Load again, on every replica, the versions that were live when the gateway stopped.

        One that cannot be loaded any more (its folder is gone) is failed: the run goes on with the others.

        Raises:
            EngineUnavailable: an engine did not answer.
        """
        for name in sorted(self._names):
            for record in self._control.adapters(name):
                if record.state == "loading":
                    self._control.set_adapter_state(name, record.version, "failed", "the gateway stopped while loading")
                elif record.state == "live":
                    await self._restore(record)

    async def _restore(self, record: wire.AdapterInfo) -> None:
        try:
            await self._replicas.load_adapter_everywhere(record.name, record.path)
        except EngineRefused as error:
            log.warning("restore_failed", extra={"adapter": record.name, "error": str(error)})
            self._control.set_adapter_state(record.policy, record.version, "failed", f"not loadable again: {error}")
            return
        self._live[record.policy, record.version] = record
        self._current[record.policy] = max(self._current[record.policy], record.version)

    def current(self, policy: str) -> int:
        """The version that new rollouts get; 0 is the base.

        Raises:
            NotFound: the gateway does not serve this policy.
        """
        if policy not in self._current:
            raise NotFound(f"policy {policy!r} is not served here; known: {', '.join(sorted(self._current))}")
        return self._current[policy]

    def model_name(self, policy: str, version: int) -> tuple[str, str | None]:
        """`(engine model name, adapter name or None)` of a version.

        Raises:
            EngineTrouble: the version is not loaded any more.
        """
        if version == 0:
            return self._base_model, None
        record = self._live.get((policy, version))
        if record is None:
            raise EngineTrouble(f"version {version} of {policy} is not loaded any more; finish this rollout")
        return record.name, record.name

    def pin(self, policy: str, version: int) -> None:
        """An open rollout or a turn in flight uses this version."""
        self._pins[policy, version] += 1

    async def unpin(self, policy: str, version: int) -> None:
        """It does no more; unloads the version when nothing else can name it."""
        self._pins[policy, version] -= 1
        if self._pins[policy, version] <= 0:
            del self._pins[policy, version]
            await self._retire(policy, version)

    async def publish(self, new: wire.PublishAdapter, cancel: Cancel) -> wire.AdapterInfo:
        """Allocate the next version, load it on every replica, then route new rollouts to it.

        Raises:
            BadRequest: `path` is not a LoRA folder.
            EngineTrouble: a replica could not load it; the old version stays current.
        """
        self.current(new.policy)
        if not _is_adapter(new.path):
            raise BadRequest(f"{new.path} has no adapter_config.json: save the adapter with save_pretrained first")
        async with self._publishing:
            await self._make_room(new.policy, cancel)
            version, name = self._control.allocate_version(new.policy, new.path, new.step, time.time_ns())
            try:
                await self._replicas.load_adapter_everywhere(name, new.path)
            except EngineError as error:
                self._control.set_adapter_state(new.policy, version, "failed", str(error))
                raise EngineTrouble(
                    f"version {version} of {new.policy} could not be loaded, {self.current(new.policy)} stays "
                    f"current: {error}"
                ) from error
            info = self._control.set_adapter_state(new.policy, version, "live")
            self._live[new.policy, version] = info
            old, self._current[new.policy] = self._current[new.policy], version
            log.info("published", extra={"policy": new.policy, "version": version, "step": new.step})
            if not self._pins[new.policy, old]:
                await self._retire(new.policy, old)
        return info

    def info(self, policy: str) -> wire.PolicyInfo:
        """The policy's current version and all live ones."""
        current = self.current(policy)
        live = [
            info.model_copy(update={"sessions": self._pins[key]})
            for key, info in sorted(self._live.items())
            if key[0] == policy
        ]
        return wire.PolicyInfo(policy=policy, base_model=self._base_model, version=current, live=live)

    def infos(self) -> list[wire.PolicyInfo]:
        """Every policy served."""
        return [self.info(name) for name in sorted(self._names)]

    async def _make_room(self, policy: str, cancel: Cancel) -> None:
        """Keep live versions below the engine's limit by cancelling the rollouts of the oldest one."""
        while self._max_live is not None and len(self._live) >= self._max_live:
            oldest = min((key for key in self._live if key[0] == policy), key=lambda key: key[1], default=None)
            if oldest is None:
                raise EngineTrouble("all adapter places of the engine are taken by other policies; raise --max-loras")
            cancelled = await cancel(policy, oldest[1], "version_retired")
            log.warning("version_retired", extra={"policy": policy, "version": oldest[1], "cancelled": cancelled})
            if oldest in self._live:
                await self._unload(policy, oldest[1])

    async def _retire(self, policy: str, version: int) -> None:
        if version and version != self._current[policy] and not self._pins[policy, version]:
            await self._unload(policy, version)

    async def _unload(self, policy: str, version: int) -> None:
        record = self._live.pop((policy, version), None)
        if record is None:
            return
        self._control.set_adapter_state(policy, version, "retired")
        try:
            await self._replicas.unload_everywhere(record.name)
        except EngineError as error:
            log.warning("unload_failed", extra={"policy": policy, "version": version, "error": str(error)})


def _is_adapter(path: str) -> bool:
    try:
        return (Path(path) / "adapter_config.json").is_file()
    except (OSError, ValueError):  # a name too long for the file system, or with a zero byte
        return False
