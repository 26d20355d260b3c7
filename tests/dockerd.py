"""A Docker daemon of the tests' own: its own socket, data and containerd, no bridge and no iptables; ended afterwards.

The base image is made from files of this machine, because no registry is needed or asked. Needs root.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import docker

BASE = "turngate-test-base"
PROGRAMS = (
    *("bash", "cat", "chmod", "cp", "cut", "dd", "env", "getent", "grep", "head", "id", "ln", "ls", "mkdir", "mkfifo"),
    *("mknod", "mount", "python3", "rm", "seq", "setsid", "sh", "sleep", "stat", "tail", "touch", "true", "wc", "yes"),
)
START_TIMEOUT_S = 60.0


@contextmanager
def own_daemon() -> Iterator[str]:
    """A running daemon's address."""
    if shutil.which("dockerd") is None:
        raise RuntimeError("dockerd is missing: requirements/setup.sh --tests installs it")
    root = Path(tempfile.mkdtemp(prefix="turngate-dockerd-"))
    address = f"unix://{root / 'd.sock'}"
    command = ["dockerd", "--data-root", str(root / "data"), "--exec-root", str(root / "exec"), "--host", address]
    command += ["--pidfile", str(root / "pid"), "--iptables=false", "--ip6tables=false", "--bridge=none"]
    with (root / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        _wait(address, process, root / "log")
        yield address
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        _unmount(root)
        shutil.rmtree(root, ignore_errors=True)


def make_base(client: docker.DockerClient) -> None:
    """Import the base image: a shell, a few programs and Python's standard library, with the libraries they need."""
    python = Path("/usr/lib") / Path(os.path.realpath("/usr/bin/python3")).name
    files = {Path(os.path.realpath(found)): f"usr/bin/{name}" for name in PROGRAMS if (found := _find(name))}
    libraries = {Path(line) for program in [*files, *_node_libraries()] for line in _libraries(program)}
    with io.BytesIO() as raw:
        with tarfile.open(fileobj=raw, mode="w") as archive:
            for link in ("bin", "lib", "lib64"):
                entry = tarfile.TarInfo(link)
                entry.type, entry.linkname = tarfile.SYMTYPE, f"usr/{link}"
                archive.addfile(entry)
            for source, name in files.items():
                archive.add(source, name)
            for library in sorted(libraries):
                archive.add(os.path.realpath(library), f"usr/{str(library).removeprefix('/usr').lstrip('/')}")
            archive.add(python, f"usr/lib/{python.name}", filter=_no_packages)
        raw.seek(0)
        client.api.import_image_from_data(raw.getvalue(), repository=BASE, tag="latest")


def _no_packages(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if re.search(r"/(test|idlelib|__pycache__|dist-packages|config-)", entry.name) else entry


def _find(name: str) -> str | None:
    return shutil.which(name, path="/usr/bin:/bin:/usr/sbin:/sbin")


def _node_libraries() -> list[Path]:
    from turngate.harnesses.install import node_dir

    return [node_dir() / "bin" / "node"]


def _libraries(program: Path) -> list[str]:
    done = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=False)
    return re.findall(r"(/\S+)(?= \(0x)", done.stdout)


def _wait(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            client = docker.DockerClient(base_url=address)
            client.ping()
            client.close()
        except (OSError, docker.errors.DockerException):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"dockerd did not start: {log.read_text()[-2000:]}") from None
            time.sleep(0.1)
        else:
            return


def _unmount(root: Path) -> None:
    """What a daemon that was killed left mounted."""
    for line in reversed(Path("/proc/self/mountinfo").read_text().splitlines()):
        point = line.split()[4]
        if point.startswith(f"{root}/"):
            subprocess.run(["umount", "-l", point], check=False)
