"""`turngate reap`: remove what runners that were killed left behind. A run does the same when it starts.

Folders and mounts of rollouts, cgroups with whatever still runs in them, and containers. What belongs to a living
runner, and what was made on another machine or in another container, is left alone.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from turngate.harnesses.cgroups import own_places, reap_cgroups
from turngate.harnesses.errors import SandboxUnavailable
from turngate.harnesses.workspace import reap_scratch
from turngate.proxy.arguments import Parser

OK, USAGE = 0, 2


def reap_command(argv: Sequence[str]) -> int:
    """Run `turngate reap`; the exit status (0 ok, 2 wrong usage)."""
    parser = Parser(prog="turngate reap", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("--scratch", type=Path, help="folder for workspaces, where a run set it")
    parser.add_argument("--docker-host", help="address of the Docker daemon, where a run set it")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    try:
        options = parser.parse_args(list(argv))
    except SystemExit as stop:
        return int(stop.code or 0)
    found = reap(options.scratch, options.docker_host)
    if options.json:
        print(json.dumps(found))
    else:
        print("\n".join(f"{name}: {what}" for name, what in found.items()))
    return OK


def reap(scratch: Path | None, docker_host: str | None) -> dict[str, int | str]:
    """What was removed, by kind; a text where a kind could not be looked at."""
    return {
        "folders": reap_scratch(scratch or Path(tempfile.gettempdir())),
        "cgroups": sum(reap_cgroups(place) for place in own_places()),
        "containers": _reap_docker(docker_host),
    }


def _reap_docker(host: str | None) -> int | str:
    from turngate.harnesses.container import connect, reap_containers

    try:
        client = connect(host)
    except SandboxUnavailable as error:
        return f"not looked at: {error}"
    try:
        return reap_containers(client)
    finally:
        client.close()
