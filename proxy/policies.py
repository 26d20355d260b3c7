"""Policies: which adapter version an alias means now, which versions must stay loaded, and the flip between them.

A version is loaded on every replica before any turn may name it, and unloaded only when no open rollout and no turn in
flight, of any worker, can. Generation is never paused. Versions come from the control store and are never reused.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

from turngate.proxy import wire
from turngate.proxy.engine.errors import EngineError, EngineRefused, EngineUnavailable
from turngate.proxy.engine.replicas import Replicas
from turngate.proxy.errors import BadRequest, EngineAway, EngineTrouble, NotFound
from turngate.proxy.store.control import ControlStore
from turngate.proxy.store.errors import Invalid

log = logging.getLogger("turngate.policies")

Cancel = Callable[[str, int, str], Awaitable[int]]

Naming = Callable[[str, int, float], Awaitable[int]]
"""`(policy, version, wait_s) -> how many turns in flight name it`, over all workers, after waiting for them to end."""

_LONG_S = 600.0
_ROOM_WAIT_S = 5.0
"""How long a publication that needs an old version's place waits for turns in flight there; they survive anyway."""


class Policies:
    """The live versions of every policy. One lock serialises publications; turns never take it."""

    def __init__(
        self,
        control: ControlStore,
        replicas: Replicas,
        *,
        base_model: str,
        names: frozenset[str],
        max_live: int | None,
        naming: Naming,
        changed: Callable[[], None] = lambda: None,
        utc_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._control = control
        self._replicas = replicas
        self._base_model = base_model
        self._names = names
        self._max_live = max_live
        self._naming = naming
        self._changed = changed
        self._utc_ns = utc_ns
        self._leaving: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._without_place: list[tuple[str, int]] = []
        self._pins: Counter[tuple[str, int]] = Counter()
        self._held: Counter[tuple[str, int]] = Counter()
        self._live: dict[tuple[str, int], wire.AdapterInfo] = {}
        self._current: dict[str, int] = dict.fromkeys(names, 0)
        self._publishing = asyncio.Lock()

    async def restore(self) -> None:
        """Load again, on every replica, the versions that were live when the gateway stopped.

        One that cannot be loaded any more (its folder is gone) is failed: the run goes on with the others. So it does
        with the newest where the engine has fewer places now than it had.

        Raises:
            EngineUnavailable: an engine did not answer.
        """
        kept = self._that_fit()
        for name in sorted(self._names):
            records = self._control.adapters(name)
            # Also those that were being loaded: an engine may have them although nobody was told.
            await self._replicas.drop(frozenset(one.name for one in records if (name, one.version) not in kept))
            for record in records:
                if record.state == "loading":
                    self._control.set_adapter_state(name, record.version, "failed", "the gateway stopped while loading")
                elif (name, record.version) in kept:
                    await self._restore(record)
                elif record.state == "live":
                    log.warning("version_retired", extra={"policy": name, "version": record.version})
                    self._control.set_adapter_state(name, record.version, "retired")
                    self._without_place.append((name, record.version))
            self._control.set_current(name, self._current[name])
        self._changed()

    def _that_fit(self) -> frozenset[tuple[str, int]]:
        """The live versions of all policies that the engine has places for: each one's newest, then those before."""
        ranked = []
        for name in sorted(self._names):
            live = sorted((one.version for one in self._control.adapters(name) if one.state == "live"), reverse=True)
            ranked += [(age, name, version) for age, version in enumerate(live)]
        return frozenset((name, version) for _, name, version in sorted(ranked)[: self._max_live])

    async def retire_unused(self, cancel: Cancel) -> None:
        """After a restart, once open rollouts are pinned again: unload what the gateway was killed before unloading.

        The rollouts of versions that found no place any more are cancelled.
        """
        for policy, version in self._without_place:
            await cancel(policy, version, "version_retired")
        for policy, version in list(self._live):
            await self._retire(policy, version)

    async def close(self) -> None:
        """Leave what is still waiting to be unloaded to the engines."""
        for task in self._leaving.values():
            task.cancel()
        await asyncio.gather(*self._leaving.values(), return_exceptions=True)

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

    def is_live(self, policy: str, version: int) -> bool:
        """Whether a rollout may be pinned to this version; the base always.

        Raises:
            NotFound: the gateway does not serve this policy.
        """
        self.current(policy)
        return version == 0 or ((policy, version) in self._live and (policy, version) not in self._leaving)

    def pin(self, policy: str, version: int, *, held: bool = False) -> None:
        """An open rollout uses this version; `held`: an evaluation, the last to give up its place."""
        self._pins[policy, version] += 1
        self._held[policy, version] += held

    async def unpin(self, policy: str, version: int, *, held: bool = False) -> None:
        """It does no more; the version is unloaded once nothing else can name it."""
        self._pins[policy, version] -= 1
        self._held[policy, version] -= held
        if self._pins[policy, version] <= 0:
            del self._pins[policy, version]
            await self._retire(policy, version)

    async def publish(self, new: wire.PublishAdapter, cancel: Cancel) -> wire.AdapterInfo:
        """Allocate the next version, load it on every replica, then route new rollouts to it.

        Raises:
            BadRequest: `path` is not a LoRA folder.
            EngineAway: no engine is there to load it; no version was taken, ask again.
            EngineTrouble: a replica could not load it; the old version stays current.
        """
        self.current(new.policy)
        if not _is_adapter(new.path):
            raise BadRequest(f"{new.path} has no adapter_config.json: save the adapter with save_pretrained first")
        async with self._publishing:
            if not self._replicas.healthy:
                raise EngineAway("no engine answers now, so no version can be loaded; ask again")
            await self._make_room(new.policy, cancel)
            version, name = self._control.allocate_version(new.policy, new.path, new.step, self._utc_ns())
            try:
                await self._replicas.load_adapter_everywhere(name, new.path)
            except EngineError as error:
                self._control.set_adapter_state(new.policy, version, "failed", str(error))
                trouble = EngineAway if isinstance(error, EngineUnavailable) else EngineTrouble
                raise trouble(
                    f"version {version} of {new.policy} could not be loaded, {self.current(new.policy)} stays "
                    f"current: {error}"
                ) from error
            info = self._control.set_adapter_state(new.policy, version, "live")
            self._control.set_current(new.policy, version)
            self._changed()
            self._live[new.policy, version] = info
            old, self._current[new.policy] = self._current[new.policy], version
            log.info("published", extra={"policy": new.policy, "version": version, "step": new.step})
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
        """Keep live versions below the engine's limit by cancelling the rollouts of the oldest one.

        One that is being evaluated goes last; the current one does too, for new rollouts get it.
        """
        while self._max_live is not None and len(self._live) >= self._max_live:
            mine, current = (key for key in self._live if key[0] == policy), (policy, self._current[policy])
            oldest = min(mine, key=lambda key: (key == current or self._held[key] > 0, key[1]), default=None)
            if oldest is None:
                raise EngineTrouble("all adapter places of the engine are taken by other policies; raise --max-loras")
            cancelled = await cancel(policy, oldest[1], "version_retired")
            log.warning("version_retired", extra={"policy": policy, "version": oldest[1], "cancelled": cancelled})
            if oldest in self._live:
                self._close_to_turns(policy, oldest[1])
                await self._naming(policy, oldest[1], _ROOM_WAIT_S)
                await self._unload(policy, oldest[1])

    async def _retire(self, policy: str, version: int) -> None:
        """Unload a version that nothing names; one that turns in flight still name once they have ended."""
        key = (policy, version)
        if not version or version == self._current[policy] or self._pins[key] or key in self._leaving:
            return
        self._close_to_turns(policy, version)
        if not await self._naming(policy, version, 0.0):
            await self._unload(policy, version)
        elif key not in self._leaving:
            self._leaving[key] = asyncio.create_task(self._unload_later(policy, version))

    async def _unload_later(self, policy: str, version: int) -> None:
        while await self._naming(policy, version, _LONG_S):
            pass
        self._leaving.pop((policy, version), None)
        await self._unload(policy, version)

    def _close_to_turns(self, policy: str, version: int) -> None:
        """From now on no turn of any worker begins with this version; it stays loaded for those in flight."""
        if (policy, version) in self._live:
            self._control.set_adapter_state(policy, version, "retired")
            self._changed()

    async def _unload(self, policy: str, version: int) -> None:
        record = self._live.pop((policy, version), None)
        if record is None:
            return
        try:
            await self._replicas.unload_everywhere(record.name)
        except EngineError as error:
            log.warning("unload_failed", extra={"policy": policy, "version": version, "error": str(error)})


def live_versions(max_loras: int | None, asked: int | None = None) -> int | None:
    """How many versions to keep loaded on an engine with `max_loras` places: one fewer, where there are several.

    With all places taken turns of other versions queue. On CPU there is a second reason, and there it only delays: see
    "One adapter place" in `docs/decisions.md`.

    Args:
        asked: the setting `max_live_versions`, which wins where the engine has so many places.

    Raises:
        Invalid: it has not.
    """
    if asked is None:
        return None if max_loras is None else max(1, max_loras - 1)
    if max_loras is not None and asked > max_loras:
        raise Invalid(
            f"max_live_versions is {asked}, but the engine has {max_loras} adapter places: start it with "
            f"--max-loras {asked} or more, or lower the setting"
        )
    return asked


def _is_adapter(path: str) -> bool:
    try:
        return (Path(path) / "adapter_config.json").is_file()
    except (OSError, ValueError):  # a name too long for the file system, or with a zero byte
        return False
