"""Cgroups of sandboxes, v1 or v2: memory, processes and cores of a whole sandbox, where this user may write them.

One folder a runner, named for its owner, and below it one a sandbox. What cannot be made is missing from `held`, and
the runner says so; nothing outside our own folders is ever changed, but for switching controllers on in a v2 parent.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from turngate.harnesses.owner import PREFIX, is_dead, owner_id
from turngate.harnesses.sandbox import Limits

CONTROLLERS = ("pids", "memory", "cpu")
PERIOD_US = 100_000
REMOVE_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class Cgroup:
    """One sandbox's folders, by controller; in v2 they are one folder."""

    folders: Mapping[str, Path]

    def joining(self, argv: Sequence[str]) -> list[str]:
        """`argv` begun inside the cgroup: a shell that joins and then becomes it."""
        files = [str(folder / "cgroup.procs") for folder in dict.fromkeys(self.folders.values())]
        if not files:
            return list(argv)
        join = 'while [ "$1" != -- ]; do echo $$ >"$1" || exit 112; shift; done; shift; exec "$@"'
        return ["/bin/sh", "-c", join, "join", *files, "--", *argv]

    def oom_kills(self) -> int:
        """How many processes the kernel ended for memory."""
        folder = self.folders.get("memory")
        if folder is None:
            return 0
        for name in ("memory.events", "memory.oom_control"):
            with suppress(OSError):
                for line in (folder / name).read_text().splitlines():
                    if line.startswith("oom_kill "):
                        return int(line.split()[1])
        return 0

    def remove(self) -> None:
        """End whatever is left in it, and remove the folders."""
        for folder in dict.fromkeys(self.folders.values()):
            remove_folder(folder)


class Cgroups:
    """Makes cgroups below `parents` (controller -> the runner's own folder)."""

    def __init__(self, parents: Mapping[str, Path]) -> None:
        self._parents = dict(parents)
        self._numbers = itertools.count(1)

    @classmethod
    def none(cls) -> Cgroups:
        """Holds nothing."""
        return cls({})

    @classmethod
    def find(cls, places: Mapping[str, Path] | None = None) -> Cgroups:
        """What this process may make, in `places` (its own ones); leftovers of dead runners there are removed."""
        places = _own() if places is None else places
        for place in dict.fromkeys(places.values()):
            reap_cgroups(place)
        parents = {}
        for controller, place in places.items():
            folder = place / f"{PREFIX}{owner_id()}"
            with suppress(OSError):
                folder.mkdir(exist_ok=True)
                if (place / "cgroup.controllers").exists():
                    _switch_on(folder, controller)
                parents[controller] = folder
        return cls(parents)

    @property
    def held(self) -> frozenset[str]:
        """The controllers that work here."""
        return frozenset(self._parents)

    @property
    def folders(self) -> list[Path]:
        """The runner's own folders, one a hierarchy."""
        return list(dict.fromkeys(self._parents.values()))

    def make(self, limits: Limits) -> Cgroup:
        """A cgroup of its own for one sandbox."""
        name = f"s{next(self._numbers)}"
        made = Cgroup({controller: parent / name for controller, parent in self._parents.items()})
        for controller, folder in made.folders.items():
            folder.mkdir(exist_ok=True)
            _limit(folder, controller, limits)
        return made

    def close(self) -> None:
        """Remove the runner's own folders and all below."""
        for parent in self.folders:
            remove_runner(parent)
        self._parents = {}


def own_places() -> list[Path]:
    """Folders in which this process may make cgroups."""
    return list(dict.fromkeys(_own().values()))


def _own() -> dict[str, Path]:
    return find_places(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())


def find_places(mounts: str, own: str) -> dict[str, Path]:
    """Controller -> folder in which this process may make cgroups, as far as /proc tells."""
    paths: dict[str, str] = {}
    for line in own.splitlines():
        _, names, path = line.split(":", 2)
        paths |= dict.fromkeys(names.split(",") if names else ["v2"], path)
    places: dict[str, Path] = {}
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        root, point = before.split()[3:5]
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup":
            for controller in set(CONTROLLERS) & set(options.split(",")):
                places.setdefault(controller, _below(point, root, paths.get(controller, "/")))
        elif kind == "cgroup2" and "v2" in paths:
            place = _handing_down(Path(point), _below(point, root, paths["v2"]))
            if place is not None:
                places |= {name: place for name in _offered(place) if name not in places}
    return {name: place for name, place in places.items() if os.access(place, os.W_OK)}


def reap_cgroups(place: Path) -> int:
    """End and remove the cgroups of dead runners in `place`; how many runners."""
    dead = [folder for folder in place.glob(f"{PREFIX}*") if is_dead(folder.name.removeprefix(PREFIX))]
    for folder in dead:
        remove_runner(folder)
    return len(dead)


def remove_runner(folder: Path) -> None:
    """Remove a runner's folder with all its sandboxes."""
    with suppress(OSError):
        for sandbox in [entry for entry in folder.iterdir() if entry.is_dir()]:
            remove_folder(sandbox)
    remove_folder(folder)


def remove_folder(folder: Path) -> None:
    """Kill what is in a cgroup, wait until it is gone, remove it."""
    deadline = time.monotonic() + REMOVE_PATIENCE_S
    while True:
        with suppress(OSError):
            folder.rmdir()
        if not folder.exists() or time.monotonic() > deadline:
            return
        with suppress(OSError):
            for pid in (folder / "cgroup.procs").read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.002)


def _below(point: str, root: str, path: str) -> Path:
    """Where `path` of the hierarchy stands under a mount of its `root`."""
    inner = path.removeprefix(root) if root != "/" and path.startswith(root) else path
    return Path(point + "/" + inner.lstrip("/")) if inner not in ("", "/") else Path(point)


def _handing_down(top: Path, own: Path) -> Path | None:
    """v2: the nearest cgroup from `own` up to the mount's `top` that may have limited cgroups below it; None: none may.

    Only the root may hold processes beside such children. A process's own cgroup holds at least that process, so for
    a login session or a systemd scope it is the slice above, where this user may move processes into it.
    """
    for place in (own, *own.parents):
        if not place.is_relative_to(top):
            return None
        processes = place / "cgroup.procs"
        is_root = not (place / "cgroup.type").exists()
        if os.access(processes, os.W_OK) and _offered(place) and (is_root or not processes.read_text()):
            return place
    return None


def _offered(place: Path) -> list[str]:
    try:
        names = (place / "cgroup.controllers").read_text().split()
    except OSError:
        return []
    return [name for name in CONTROLLERS if name in names]


def _switch_on(folder: Path, controller: str) -> None:
    """v2: hand a controller down from the parent to the runner's folder, and from there to its sandboxes.

    Raises:
        OSError: the parent got processes of its own meanwhile, and is not the root.
    """
    for place in (folder.parent, folder):
        file = place / "cgroup.subtree_control"
        if controller not in file.read_text().split():
            file.write_text(f"+{controller}")


def _limit(folder: Path, controller: str, limits: Limits) -> None:
    """Write one controller's limit in the words of its version."""
    v2 = (folder / "cgroup.controllers").exists()
    if controller == "pids":
        (folder / "pids.max").write_text(str(limits.processes))
    elif controller == "memory":
        (folder / ("memory.max" if v2 else "memory.limit_in_bytes")).write_text(str(limits.memory_bytes))
        with suppress(OSError):  # where swap is not accounted
            if v2:
                (folder / "memory.swap.max").write_text("0")
            else:
                (folder / "memory.memsw.limit_in_bytes").write_text(str(limits.memory_bytes))
    elif limits.cpus is not None:
        quota_us = max(1000, round(limits.cpus * PERIOD_US))
        if v2:
            (folder / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
        else:
            (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (folder / "cpu.cfs_quota_us").write_text(str(quota_us))
