"""Images of tasks: built from `environment/Dockerfile` when its base is here, found again by the files they came from.

Nothing is ever pulled: a base that is missing is named with the command that fetches it. What the image holds at the
task's working directory becomes the workspace, so that it can be copied for the verifier like any other.
"""

from __future__ import annotations

import hashlib
import io
import re
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from turngate.harnesses.errors import Fault
from turngate.harnesses.owner import owner_id
from turngate.harnesses.sandbox import Ground
from turngate.tasks.harbor import Task

if TYPE_CHECKING:
    from docker import DockerClient

REPOSITORY = "turngate-task"
OWNER_LABEL = "turngate.owner"


def make_ground(client: DockerClient, task: Task, default: str | None, network: str | None, folder: Path) -> Ground:
    """The image of `task`, and in `folder` the files its workspace starts with.

    Raises:
        Fault: `sandbox_start`: no Dockerfile and no default, a base that is missing, or a build that failed.
    """
    if not (task.environment / "Dockerfile").is_file():
        if default is None:
            raise Fault("sandbox_start", f"{task.name} has no environment/Dockerfile; set docker_image for such tasks")
        require(client, default)
        return Ground(task.environment if task.environment.is_dir() else None, default)
    tag = f"{REPOSITORY}:{content_hash(task.environment)}"
    if not is_present(client, tag):
        build(client, task, tag, network)
    files = folder / hashlib.sha256(f"{tag}\0{task.workdir}".encode()).hexdigest()[:24]
    if not files.exists():
        take_out(client, tag, str(task.workdir), files)
    return Ground(files, tag)


def content_hash(environment: Path) -> str:
    """sha256 over names, modes and contents of all files, and the targets of links."""
    total = hashlib.sha256()
    for path in sorted(environment.rglob("*")):
        name = path.relative_to(environment).as_posix()
        if path.is_symlink():
            total.update(f"{name}\0link\0{path.readlink()}\n".encode())
        elif path.is_file():
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            total.update(f"{name}\0{path.stat().st_mode & 0o777:o}\0{content}\n".encode())
    return total.hexdigest()[:32]


def bases(dockerfile: str) -> list[str]:
    """Images a Dockerfile begins from: not its own stages, not `scratch`, not what an ARG decides."""
    stages, found = {"scratch"}, []
    for line in dockerfile.splitlines():
        match = re.match(r"\s*FROM\s+(?:--\S+\s+)*(\S+)(?:\s+AS\s+(\S+))?", line, re.IGNORECASE)
        if match is not None:
            base, stage = match.groups()
            if base.lower() not in stages and "$" not in base:
                found.append(base)
            if stage:
                stages.add(stage.lower())
    return found


def is_present(client: DockerClient, image: str) -> bool:
    """Whether the daemon has it."""
    from docker.errors import ImageNotFound

    try:
        client.api.inspect_image(image)
    except ImageNotFound:
        return False
    return True


def require(client: DockerClient, image: str) -> None:
    """Fail in words where an image is missing.

    Raises:
        Fault: `sandbox_start`.
    """
    if not is_present(client, image):
        raise Fault("sandbox_start", f"the image {image} is not here and a run pulls nothing: docker pull {image}")


def build(client: DockerClient, task: Task, tag: str, network: str | None) -> None:
    """Build the task's image.

    Raises:
        Fault: `sandbox_start` with the build's last lines.
    """
    from docker.errors import APIError, BuildError

    for base in bases((task.environment / "Dockerfile").read_text(encoding="utf-8")):
        require(client, base)
    try:
        client.images.build(path=str(task.environment), tag=tag, rm=True, forcerm=True, network_mode=network)
    except BuildError as error:
        lines = [str(entry.get("stream") or entry.get("error") or "").strip() for entry in error.build_log]
        tail = " | ".join(line for line in lines if line)[-600:]
        raise Fault("sandbox_start", f"{task.name}: its Dockerfile cannot be built: {tail}") from error
    except APIError as error:
        raise Fault("sandbox_start", f"{task.name}: its Dockerfile cannot be built: {error.explanation}") from error


def take_out(client: DockerClient, image: str, path: str, target: Path) -> None:
    """Copy what the image holds at `path` to `target`; nothing there is an empty folder."""
    from docker.errors import NotFound

    building = target.with_name(f"{target.name}.part")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    holder = client.api.create_container(image, command=["true"], labels={OWNER_LABEL: owner_id()})
    try:
        chunks, _ = client.api.get_archive(holder["Id"], path)
        with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as archive:
            unpack(archive, building)
        inner = building / Path(path).name
    except NotFound:
        inner = building / "nothing"
        inner.mkdir()
    finally:
        client.api.remove_container(holder["Id"], force=True)
    inner.rename(target)
    shutil.rmtree(building, ignore_errors=True)


def unpack(archive: tarfile.TarFile, folder: Path) -> None:
    """Extract what tarfile's filter "tar" would, which Python has from 3.11.4 on only and Debian 12's is 3.11.2.

    Raises:
        Fault: `sandbox_start`: a name leads out of `folder`, by itself or over a link that was extracted before.
    """
    root = folder.resolve()

    def kept() -> Iterator[tarfile.TarInfo]:
        for member in archive:
            member.name = member.name.lstrip("/")
            if not (root / member.name).resolve().is_relative_to(root):
                raise Fault("sandbox_start", f"the image holds {member.name!r}, which leads out of its folder")
            member.mode &= 0o755
            yield member

    archive.extraction_filter = lambda member, _: member
    archive.extractall(root, members=kept())
