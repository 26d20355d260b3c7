"""npm as an installer: `npm ci` from a lock, run by a node from PyPI.

No install scripts run, and integrity comes from the lock; the user's own registry settings apply.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from turngate.harnesses.errors import InstallError

TIMEOUT_S = 900.0


def install(folder: Path, node: Path) -> None:
    """Install what the lock in `folder` says into its node_modules; `node` is the folder with bin/node.

    Raises:
        InstallError: npm failed or did not end.
    """
    cli = node / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    command = [str(node / "bin" / "node"), str(cli), "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    env = {**os.environ, "PATH": f"{node / 'bin'}:{os.environ.get('PATH', os.defpath)}"}
    run(command, folder, env)


def version_of(folder: Path, package: str) -> str | None:
    """The version of `package` that is in `folder`."""
    found = folder / "node_modules" / package / "package.json"
    return str(json.loads(found.read_text())["version"]) if found.exists() else None


def run(command: list[str], folder: Path, env: dict[str, str]) -> None:
    """Run one installer to its end, in `folder`.

    Raises:
        InstallError: it failed; its last lines are in the message.
    """
    what = " ".join(Path(word).name for word in command[:4])
    try:
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise InstallError(
            f"{what} … did not end within {TIMEOUT_S:.0f} s; is the registry reachable? Run it again: what was "
            "downloaded is kept"
        ) from error
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-12:])
        raise InstallError(f"{what} … failed with status {done.returncode} in {folder}:\n{tail}")
