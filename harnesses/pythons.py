"""The Python that an agent from PyPI runs on: the runner's own, or another version of this machine.

Some agents run on one version only. It is looked for where people put several: PATH, pyenv, uv. Whatever is found is
asked what it is before it counts; nothing is downloaded, because an interpreter is the machine's business.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from turngate.harnesses.errors import InstallError

ASK = "import sys; print(sys.base_prefix, *sys.version_info[:2], sep='\\n')"
ASK_TIMEOUT_S = 30.0

Version = tuple[int, int]


def base_python() -> Path:
    """The Python behind this one's virtual environment: what a PyPI harness runs on that takes any."""
    return Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"


def find_python(version: Version, who: str) -> Path:
    """A Python of exactly `version`, as the path in its own installation, outside of any virtual environment.

    Args:
        who: who needs it, for the message.

    Raises:
        InstallError: there is none; the message says where to put one.
    """
    if sys.version_info[:2] == version:
        return base_python()
    for candidate in _candidates(f"python{version[0]}.{version[1]}"):
        if (found := _asked(candidate, version)) is not None:
            return found
    wanted = f"{version[0]}.{version[1]}"
    raise InstallError(
        f"{who} runs on Python {wanted} only and there is none here: put python{wanted} on PATH, or install it with "
        f"pyenv or `uv python install {wanted}`"
    )


def _candidates(name: str) -> Iterator[Path]:
    """Where a Python of that name may be."""
    home = Path.home()
    folders = [Path(folder) for folder in os.get_exec_path()]
    folders += sorted(Path(os.environ.get("PYENV_ROOT", home / ".pyenv")).glob("versions/*/bin"), reverse=True)
    uv = os.environ.get("UV_PYTHON_INSTALL_DIR", home / ".local" / "share" / "uv" / "python")
    folders += sorted(Path(uv).glob("*/bin"), reverse=True)
    return (folder / name for folder in folders if (folder / name).is_file())


def _asked(candidate: Path, version: Version) -> Path | None:
    """What `candidate` says it is, or None: another version, or a shim with nothing behind it."""
    try:
        done = subprocess.run([candidate, "-I", "-c", ASK], capture_output=True, text=True, timeout=ASK_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    prefix, *numbers = done.stdout.splitlines() or [""]
    if done.returncode != 0 or numbers != [str(number) for number in version]:
        return None
    own = Path(prefix) / "bin" / candidate.name
    return own if own.is_file() else None
