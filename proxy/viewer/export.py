"""One rollout as plain HTML files that need no server.

The files are the same pages, fetched from the application in this process, with their links made relative.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import httpx
from starlette.types import ASGIApp

from turngate.proxy.viewer.reader import StoreReader, ViewerError

_STATIC = Path(__file__).parent / "static"
_LINK = re.compile(r'(href|src)="(/[^"]*)"')


async def write_static(app: ASGIApp, reader: StoreReader, rollout: str, folder: Path) -> int:
    """Write the pages of `rollout` to `folder`; returns how many files.

    Raises:
        ViewerError: there is no such rollout.
    """
    turns = reader.turns(rollout)
    names = {f"/rollouts/{rollout}": "index.html", f"/rollouts/{rollout}/rows": "rows.html"}
    names |= {f"/rollouts/{rollout}/turns/{turn.seq}": f"turn-{turn.seq}.html" for turn in turns}
    folder.mkdir(parents=True, exist_ok=True)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for path, name in names.items():
            answer = await client.get(path, params={"tokens": "all"})
            if answer.status_code != 200:
                raise ViewerError(f"no rollout {rollout!r} in run {reader.name!r}; its id is on the rollout's page")
            (folder / name).write_text(_LINK.sub(lambda link: _relative(link, names), answer.text), encoding="utf-8")
    (folder / "static").mkdir(exist_ok=True)
    copied = [file for file in _STATIC.iterdir() if file.is_file()]
    for file in copied:
        shutil.copyfile(file, folder / "static" / file.name)
    return len(names) + len(copied)


def _relative(link: re.Match[str], names: dict[str, str]) -> str:
    attribute, target = link.group(1), link.group(2)
    path, mark, fragment = target.partition("#")
    if path.startswith("/static/"):
        return f'{attribute}="{path[1:]}"'
    if path in names:
        return f'{attribute}="{names[path]}{mark}{fragment}"'
    return 'data-left-out=""'
