"""The parts of a run kept alive: started, watched, and started again when one dies, each on what it stands on.

Engine below gateway below all others: a part is started again only when what it stands on is ready. Whether at all is
`restarts.py`'s to say. It must never restart a part that ended well, or one that is being stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turngate.trainer import engine_process as engine
from turngate.trainer.children import Child, ChildError, Children
from turngate.trainer.restarts import Lives, RestartSettings

ENDING = frozenset({"trainer", "runner", "demonstrations", "sft"})
"""Parts that may end with status 0 while the run goes on."""

BELOW: Mapping[str, Sequence[str]] = {"engine": (), "gateway": ("engine",)}
"""What a part stands on; any other stands on both of these."""

PROBE_EVERY_S = 0.5
PORT_PATIENCE_S = 60.0
"""How long a dead part's port may stay taken before that ends the run."""

Event = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Part:
    """How a part is started. `again` are arguments more when it is started again; with a `url` it is ready once that
    answers 200, without one as soon as it is started."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] | None = None
    again: Sequence[str] = ()
    port: int | None = None
    url: str | None = None
    start_timeout_s: float = float("inf")


@dataclass(slots=True)
class _Kept:
    part: Part
    lives: Lives
    child: Child
    started_s: float
    ready_s: float | None = None
    probed_s: float = 0.0
    due_s: float | None = None
    """When it is to be started again; None while it runs."""
    over: bool = False
    """Whether its end is final."""


@dataclass
class Parts:
    """All parts of one run. `say` is told sentences for people, `event` facts for the record."""

    children: Children
    settings: RestartSettings
    say: Callable[[str], None]
    event: Event
    _kept: dict[str, _Kept] = field(default_factory=dict)
    _ending: set[str] = field(default_factory=lambda: set(ENDING))
    _stopping: set[str] = field(default_factory=set)

    def start(self, part: Part) -> Child:
        """Start a part for the first time. Raises ChildError."""
        child, now_s = self._spawn(part, ()), time.monotonic()
        self._kept[part.name] = _Kept(part, Lives(self.settings), child, now_s, None if part.url else now_s)
        self._tell_started(self._kept[part.name])
        return child

    def await_ready(self, name: str, tick: Callable[[float], None]) -> None:
        """Return once a part that was just started is ready; `tick(waited_s)` is called now and then.

        Raises ChildError when it ends first or the time is up: what never worked is not tried again.
        """
        kept = self._kept[name]
        if kept.part.url is not None and kept.part.port is not None:
            engine.wait_healthy(kept.part.url, kept.child, self.children, kept.part.start_timeout_s, tick)
            self._is_ready(kept)

    def tick(self) -> None:
        """Take in what ended, start again what is due. Raises ChildError when a death ends the run."""
        self.children.poll()
        for kept in self._kept.values():
            if kept.over or kept.part.name in self._stopping:
                continue
            if kept.due_s is not None:
                self._start_again(kept)
            elif not kept.child.alive:
                self._ended(kept)
            elif kept.ready_s is None:
                self._look(kept)

    def done(self, name: str) -> bool:
        """Whether a part has ended well."""
        return self._kept[name].over

    def ready(self, *names: str) -> bool:
        """Whether all of these that there are take work."""
        found = (self._kept[name] for name in names if name in self._kept)
        return all(kept.child.alive and kept.ready_s is not None for kept in found)

    def may_end(self, name: str) -> None:
        """From now on this part may end well."""
        self._ending.add(name)

    def about(self) -> dict[str, dict[str, Any]]:
        """Process, port, command line and restarts of every part, for run.json."""
        return {
            name: {
                "pid": kept.child.pid,
                "port": kept.part.port,
                "argv": list(kept.part.argv),
                "restarts": kept.lives.restarts,
            }
            for name, kept in self._kept.items()
        }

    def stopping(self, names: Collection[str]) -> None:
        """From now on the deaths of these are wanted."""
        self._stopping.update(names)

    def __contains__(self, name: object) -> bool:
        return name in self._kept

    def _ended(self, kept: _Kept) -> None:
        child, part, now_s = kept.child, kept.part, time.monotonic()
        if child.code == 0 and part.name in self._ending:
            kept.over = True
            return
        assert child.code is not None
        well_s = None if kept.ready_s is None else now_s - kept.ready_s
        verdict = kept.lives.died(child.code, well_s)
        self.event("died", part=part.name, pid=child.pid, code=child.code, after_s=round(now_s - kept.started_s, 1))
        if verdict.pause_s is None:
            end = f"\n{part.name} is not started again: {verdict.why}" if verdict.why else ""
            raise ChildError(child.reason() + end)
        self.say(f"{child.reason(3)}\n    starting it again in {verdict.pause_s:g} s")
        kept.due_s, kept.ready_s = now_s + verdict.pause_s, None

    def _start_again(self, kept: _Kept) -> None:
        part, now_s = kept.part, time.monotonic()
        assert kept.due_s is not None
        if not self.ready(*BELOW.get(part.name, ("engine", "gateway"))):
            kept.due_s = max(kept.due_s, now_s)
        if now_s <= kept.due_s:
            return
        if part.port is not None:
            try:
                engine.own_port(part.port, part.name)
            except engine.EngineError:
                if now_s - kept.due_s > PORT_PATIENCE_S:
                    raise
                return
        kept.child = self._spawn(part, part.again)
        kept.started_s = time.monotonic()
        kept.due_s, kept.ready_s = None, None if part.url else kept.started_s
        self._tell_started(kept)

    def _look(self, kept: _Kept) -> None:
        """Whether a part that was started again is ready."""
        part, now_s = kept.part, time.monotonic()
        if part.url is None or now_s - kept.probed_s < PROBE_EVERY_S:
            return
        kept.probed_s = now_s
        if not self.ready(*BELOW.get(part.name, ())):
            kept.started_s = now_s  # it waits for another
        if engine.healthy(part.url):
            self._is_ready(kept)
        elif now_s - kept.started_s > part.start_timeout_s:
            self.say(f"{part.name} was not ready after {part.start_timeout_s:.0f} s ({part.url}): ending it")
            self.children.kill(kept.child)

    def _is_ready(self, kept: _Kept) -> None:
        assert kept.part.port is not None
        engine.check_owned(kept.part.port, self.children)
        kept.ready_s = time.monotonic()
        took_s = kept.ready_s - kept.started_s
        self.event("ready", part=kept.part.name, pid=kept.child.pid, after_s=round(took_s, 1))
        self.say(f"{kept.part.name} ready after {took_s:.0f} s")

    def _spawn(self, part: Part, more: Sequence[str]) -> Child:
        return self.children.start(part.name, [*part.argv, *more], part.env)

    def _tell_started(self, kept: _Kept) -> None:
        part, child, restarts = kept.part, kept.child, kept.lives.restarts
        self.event("started", part=part.name, pid=child.pid, restarts=restarts)
        where = f"pid {child.pid}" + (f", port {part.port}" if part.port else "")
        self.say(f"{part.name} started{f' again, restart {restarts}' if restarts else ''} ({where})")
