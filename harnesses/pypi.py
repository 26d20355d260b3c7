"""PyPI as an installer: wheels from a hashed lock into a folder of their own, never into an environment.

The pip of the very Python they are for does it, because an old pip breaks under a newer Python; or uv does. No package
is built and none is resolved: the lock is the whole list.
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
from turngate.harnesses.pythons import base_python

SITE = "site"
PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--compile")
"""Agents start from compiled files."""


def install(folder: Path, python: Path) -> None:
    """Install what requirements.lock in `folder` says for `python` into its `site`, compiled.

    Raises:
        InstallError: there is neither pip nor uv, or it failed.
    """
    words = ["--require-hashes", "--no-deps", "--only-binary", ":all:", "--target", SITE]
    venv = folder / "venv"
    run([*_installer(python, venv), *words, "-r", "requirements.lock"], folder, dict(os.environ))
    if venv.exists():
        shutil.rmtree(venv)


def version_of(folder: Path, package: str) -> str | None:
    """The version of `package` that is in `folder`."""
    found = importlib.metadata.distributions(name=package, path=[str(folder / SITE)])
    return next((one.version for one in found), None)


def _installer(python: Path, venv: Path) -> list[str]:
    """The words that install for `python`: pip first, because uv does not read the settings of a user's pip.

    Where this environment's pip is another Python's, `python` makes an environment at `venv` with the pip it brought.
    """
    has_pip = importlib.util.find_spec("pip") is not None
    if has_pip and python == base_python():
        return [sys.executable, *PIP]
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.exists() else shutil.which("uv")
    by_uv = [uv, "pip", "install", "--python", str(python), "--compile-bytecode"] if uv else []
    if by_uv and not has_pip:
        return by_uv
    try:
        run([str(python), "-I", "-m", "venv", str(venv)], venv.parent, dict(os.environ))
    except InstallError as error:
        if by_uv:
            return by_uv
        raise InstallError(
            f"neither pip nor uv is here to install for {python}: put uv on PATH, or give that Python its venv and "
            f"ensurepip (on Debian and Ubuntu the package {python.name}-venv). {error}"
        ) from error
    return [str(venv / "bin" / "python"), "-I", *PIP]
