"""What an agent sees of a sandbox that encloses it: the same paths and the same gateway address in every rollout.

Shared by bubblewrap and Docker, so that prompts of a group agree and a harness needs to know one layout only.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit, urlunsplit

from turngate.harnesses.base import Places
from turngate.harnesses.install import Installed
from turngate.harnesses.pythons import base_python
from turngate.harnesses.sandbox import OPT
from turngate.harnesses.spawn import DOOR_PORT

HOME = PurePosixPath("/home/agent")


class Enclosed:
    """Part of a `Sandbox` whose agents see mounts instead of the host's paths."""

    def places(self, installed: Installed | None, home: Path, workspace: Path, workdir: PurePosixPath) -> Places:
        """The same for every rollout, so that prompts of a group agree."""
        python = PurePosixPath(installed.python if installed else base_python())
        return Places(OPT / "harness", OPT / "node" / "bin" / "node", HOME, workdir, python)

    def path(self, host: Path, wanted: PurePosixPath) -> PurePosixPath:
        """Mounts appear where they are wanted."""
        return wanted

    def gateway_url(self, base_url: str) -> str:
        """The session's URL through the door on loopback."""
        return urlunsplit(urlsplit(base_url)._replace(scheme="http", netloc=f"127.0.0.1:{DOOR_PORT}"))
