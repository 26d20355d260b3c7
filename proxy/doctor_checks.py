"""The doctor's checks of the gateway's own ground: versions, limits, the store's disk, the port.

Every check says what it found, not what it assumes: it writes, syncs, locks and binds for real, and cleans up.
"""

from __future__ import annotations

import http.client
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import socket
import sqlite3
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from turngate.proxy.store.control import ControlStore
from turngate.proxy.store.database import OwnerLock
from turngate.proxy.store.errors import StoreBusy, StoreError, StoreMissing
from turngate.proxy.store.layout import StoreFolder

Line = tuple[str, str, str, str]

PACKAGES = ("turngate", "fastapi", "uvicorn", "pydantic", "orjson", "numpy", "tokenizers")
LOW_BYTES, TOO_LOW_BYTES = 5 * 10**9, 200 * 10**6
FILES = 4096
ASK_S = 5.0
VOLATILE = frozenset({"tmpfs", "ramfs", "overlay"})
NETWORKED = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "fuse.s3fs", "lustre", "ceph", "glusterfs"})


def checks(options: Mapping[str, Any]) -> Iterator[Line]:
    """Lines about Python, packages, limits, disk and port."""
    yield from _versions()
    yield from _limits()
    yield from disk(options["store"])
    yield from _store(options["store"])
    yield from port(options["host"], options["port"])


def _versions() -> Iterator[Line]:
    status = "ok" if sys.version_info >= (3, 11) else "fail"
    yield (
        status,
        "python",
        f"{platform.python_version()} on {platform.platform()}",
        "" if status == "ok" else "use 3.11+",
    )
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            yield "warn", "packages", f"{name} is not installed as a package", "pip install turngate"
    yield "ok", "packages", ", ".join(found), ""
    version = sqlite3.sqlite_version
    if sqlite3.sqlite_version_info < (3, 35):
        yield "fail", "sqlite", f"{version} is too old", "use a Python built with SQLite 3.35 or later"
    else:
        yield "ok", "sqlite", version, ""


def _limits() -> Iterator[Line]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < FILES:
        todo = f"ulimit -n {min(hard, 65_536) if hard > 0 else 65_536} before starting the gateway"
        yield "warn", "open files", f"at most {soft}: about {soft // 3} turns at once", todo
    else:
        yield "ok", "open files", f"at most {soft}", ""


def disk(store: Path) -> Iterator[Line]:
    """Lines about the file system under `store`: kind, space, and whether a database can live there."""
    folder = next(one for one in (store.resolve(), *store.resolve().parents) if one.is_dir())
    kind, free = file_system(folder), shutil.disk_usage(folder).free
    where = f"{folder} ({kind})"
    if kind in NETWORKED:
        todo = "put the store on a local disk: SQLite's locks and shared memory do not work over a network"
        yield "fail", "file system", where, todo
    elif kind in VOLATILE:
        yield "warn", "file system", f"{where} is lost with the machine or container", "put the store on a real disk"
    else:
        yield "ok", "file system", where, ""
    words, todo = f"{free / 1e9:.1f} GB free in {folder}", "free some, or `turngate prune` an old store"
    if free < TOO_LOW_BYTES:
        yield "fail", "disk space", words, todo
    else:
        yield ("warn", "disk space", words, todo) if free < LOW_BYTES else ("ok", "disk space", words, "")
    yield from _database(folder)


def _database(folder: Path) -> Iterator[Line]:
    """A real database in write-ahead mode, synced to the disk, in a folder that is removed again."""
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".turngate-doctor-") as place:
            ControlStore(Path(place) / "control.sqlite", run="doctor", durability="full").close()
            with open(Path(place) / "page", "wb") as file:
                file.write(b"\0" * 4096)
                file.flush()
                begun_s = time.perf_counter()
                os.fsync(file.fileno())
                took_ms = (time.perf_counter() - begun_s) * 1e3
    except (OSError, StoreError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or error
        yield "fail", "store writes", f"no database can be made in {folder}: {why}", "choose another folder"
        return
    yield (
        "ok",
        "store writes",
        f"SQLite in write-ahead mode works, locks too; fsync of a page took {took_ms:.1f} ms",
        "",
    )


def _store(path: Path) -> Iterator[Line]:
    try:
        folder = StoreFolder.find(path)
        with ControlStore(folder.control, readonly=True) as control:
            words = f"{folder.path}: run {folder.run}, {control.summary().finished_rollouts} rollouts finished"
    except StoreMissing:
        yield "ok", "store", f"none in {path} yet; the gateway makes it", ""
        return
    except StoreError as error:
        yield "fail", "store", str(error), "see above; `turngate verify` looks further"
        return
    if folder.path.stat().st_mode & 0o077:
        todo = f"chmod 700 {folder.path}, unless they may read what agents and models said"
        yield "warn", "store", f"other users of this machine can look into {folder.path}", todo
    try:
        OwnerLock(folder.control).release()
    except StoreBusy:
        yield "warn", "store", f"{words}; a gateway is running on it", "stop it before you start another there"
        return
    yield "ok", "store", words, ""


def port(host: str, number: int) -> Iterator[Line]:
    """Whether the gateway could listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, number))
    except (OSError, OverflowError) as error:
        if _gateway_at(host, number):
            todo = "stop it before you start another there, or give that one another --port"
            yield "warn", "port", f"a gateway is running on {host}:{number}", todo
            return
        todo = "end what listens there, or choose another with --port (and --host)"
        yield "fail", "port", f"cannot listen on {host}:{number}: {error}", todo
        return
    yield "ok", "port", f"{host}:{number} is free", ""


def _gateway_at(host: str, number: int) -> bool:
    """Whether what listens there answers as a gateway does."""
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    connection = http.client.HTTPConnection(address, number, timeout=ASK_S)
    try:
        connection.request("GET", "/readyz")
        found = json.loads(connection.getresponse().read(65_536))
    except (OSError, OverflowError, ValueError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return isinstance(found, dict) and {"ready", "missing"} <= set(found)


def file_system(folder: Path) -> str:
    """The type of the file system under `folder`, from /proc/mounts; `unknown` where there is none."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return "unknown"
    above = {str(folder), *map(str, folder.parents)}
    found = [(len(point), place, kind) for place, (point, kind) in enumerate(mounts) if point in above]
    return max(found)[2] if found else "unknown"
