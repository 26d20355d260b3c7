"""PyPI as an installer: wheels from a hashed lock into a folder of their own, never into an environment.

pip does it, or uv where there is no pip. No package is built and none is resolved: the lock is the whole list.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
from pathlib import Path

from turngate.harnesses.errors import InstallError
from turngate.harnesses.npm import run

SITE = "site"


def install(folder: Path, python: Path) -> None:
    """Install what requirements.lock in `folder` says for `python` into its `site`, compiled.

    Raises:
        InstallError: there is neither pip nor uv, or it failed.
    """
    words = ["--require-hashes", "--no-deps", "--only-binary", ":all:", "--target", SITE]
    run([*_installer(python), *words, "-r", "requirements.lock"], folder, dict(os.environ))


def version_of(folder: Path, package: str) -> str | None:
    """The version of `package` that is in `folder`."""
    found = importlib.metadata.distributions(name=package, path=[str(folder / SITE)])
    return next((one.version for one in found), None)


def _installer(python: Path) -> list[str]:
    """The words of pip of this Python, or of uv, that install for `python`; agents start from compiled files."""
    if importlib.util.find_spec("pip") is not None:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
        return [*pip, "--python", str(python), "install", "--compile"]
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.exists() else shutil.which("uv")
    if uv is None:
        raise InstallError("neither pip nor uv is here to install with; `python -m ensurepip` brings pip")
    return [uv, "pip", "install", "--python", str(python), "--compile-bytecode"]
