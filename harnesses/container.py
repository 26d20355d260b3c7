"""Docker containers: the task's own image, no network but the gateway's socket, limits held by the daemon.

The door inside (`templates/docker/door.js`, run by the mounted node) leads to a socket of the runner; a job without a
gateway runs alone. A container carries its runner's name, so that one left by a dead runner is removed by the next.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from turngate.harnesses.attached import Attached
from turngate.harnesses.disk import wait_until_full
from turngate.harnesses.enclosed import Enclosed
from turngate.harnesses.errors import Fault, SandboxUnavailable
from turngate.harnesses.images import OWNER_LABEL, make_ground
from turngate.harnesses.owner import is_dead, owner_id
from turngate.harnesses.relay import Relay
from turngate.harnesses.sandbox import OPT, Finished, Ground, Job, Limits
from turngate.harnesses.spawn import DOOR_PORT
from turngate.harnesses.surely import surely
from turngate.tasks.harbor import Task

if TYPE_CHECKING:
    from docker import DockerClient

DOOR = Path(__file__).parent / "templates" / "docker" / "door.js"
GATE = OPT / "gate"
SIZE_EVERY_S = 5.0
EXIT_POLL_S = 0.05


class Docker(Enclosed):
    """See `turngate.harnesses.sandbox.Sandbox`. `folder` is the runner's own, for sockets and unpacked images."""

    name = "docker"
    isolated = True

    def __init__(self, folder: Path, *, host: str | None = None, image: str | None = None, network: str | None = None):
        self._folder = folder
        self._image = image
        self._network = network
        self._client = connect(host)
        self._grounds: dict[str, asyncio.Task[Ground]] = {}
        self._env: dict[str, list[str]] = {}

    def check(self) -> None:
        """Ask the daemon, and remove what dead runners left there."""
        reap_containers(self._client)

    def unenforced(self, limits: Limits) -> list[str]:
        """What the daemon says it cannot do; what is written outside the workspace is held in strict mode only."""
        info = self._client.info()
        words = {"MemoryLimit": "memory", "PidsLimit": "processes", "CpuCfsQuota": "cpus"}
        lost = [f"{name}: the Docker daemon cannot hold it here" for key, name in words.items() if not info.get(key)]
        if not limits.strict:
            lost.append("disk: outside workspace and home it is watched, not held (held with limits.strict: read-only)")
        return lost

    async def prepare(self, task: Task) -> Ground:
        """Build the image once; rollouts that come meanwhile wait for it."""
        if task.digest not in self._grounds:
            folder = self._folder / "images"
            make = asyncio.to_thread(make_ground, self._client, task, self._image, self._network, folder)
            self._grounds[task.digest] = asyncio.create_task(make)
        try:
            return await asyncio.shield(self._grounds[task.digest])
        except OSError as error:
            raise Fault("sandbox_start", f"the image of {task.name} cannot be made: {error}") from error

    def close(self) -> None:
        """Remove containers that are left of this runner, and let go of the daemon."""
        with suppress(OSError):
            remove_containers(self._client, lambda owner: owner == owner_id())
        self._client.close()

    async def run(self, job: Job) -> Finished:
        """See the protocol."""
        if job.image is None:
            raise Fault("sandbox_start", "no image: prepare() was not asked for this task")
        name = f"turngate-{uuid4().hex}"
        began = time.monotonic()
        async with AsyncExitStack() as stack:
            gate = await stack.enter_async_context(self._gate(job))
            creating = asyncio.ensure_future(asyncio.to_thread(self._create, name, job, gate))
            stack.push_async_callback(self._remove, name, creating)
            try:
                await asyncio.shield(creating)
                attached = await stack.enter_async_context(Attached(self._client, name, job.limits.output_bytes))
                await asyncio.to_thread(self._client.api.start, name)
            except OSError as error:  # what requests and docker raise
                raise Fault("sandbox_start", f"docker: {error}") from error
            timed_out, exceeded = False, ""
            try:
                async with asyncio.timeout(job.deadline_s - (time.monotonic() - began)):
                    exceeded = await self._watch(name, job, attached)
            except TimeoutError:
                timed_out = True
            if timed_out or exceeded:
                with suppress(OSError):
                    await asyncio.to_thread(self._client.api.kill, name)
            state = await self._exit_state(name)
        code = -9 if timed_out or exceeded else int(state.get("ExitCode", -1))
        spent_s, oom = time.monotonic() - began, int(bool(state.get("OOMKilled")))
        return Finished(code, attached.stdout, attached.stderr, timed_out, spent_s, exceeded, oom)

    @asynccontextmanager
    async def _gate(self, job: Job) -> AsyncIterator[Path | None]:
        """A folder with the socket behind which the runner forwards to the gateway; None without one."""
        if job.gateway is None:
            yield None
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="gate-", dir=self._folder))
        folder.chmod(0o755)
        at = os.open(folder, os.O_DIRECTORY)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(f"/proc/self/fd/{at}/gateway.sock")  # a path of its own may be longer than sockets allow
            listener.listen(64)
            listener.setblocking(False)
            (folder / "gateway.sock").chmod(0o777)
            async with Relay(listener, job.gateway):
                yield folder
        finally:
            listener.close()
            os.close(at)
            shutil.rmtree(folder, ignore_errors=True)

    def _create(self, name: str, job: Job, gate: Path | None) -> None:
        limits, api = job.limits, self._client.api
        argv = list(job.argv)
        mounts = [(mount.source, mount.target, mount.writable) for mount in job.mounts]
        if gate is not None:
            mounts += [(gate, GATE, False), (DOOR, OPT / "door.js", False)]
            node = str(OPT / "node" / "bin" / "node")
            argv = [node, str(OPT / "door.js"), str(GATE / "gateway.sock"), str(DOOR_PORT), *argv]
        config = api.create_host_config(
            binds=[f"{source}:{target}:{'rw' if writable else 'ro'}" for source, target, writable in mounts],
            network_mode="none",
            cap_drop=["ALL"],
            security_opt=["no-new-privileges:true"],
            read_only=limits.strict,
            tmpfs={"/tmp": f"size={limits.workspace_bytes},mode=1777,exec"},
            shm_size=min(limits.workspace_bytes, 64 << 20),
            mem_limit=limits.memory_bytes,
            memswap_limit=limits.memory_bytes,
            pids_limit=limits.processes,
            nano_cpus=None if limits.cpus is None else round(limits.cpus * 1e9),
            ulimits=_ulimits(limits),
            log_config={"Type": "none", "Config": {}},
        )
        assert job.image is not None
        api.create_container(
            job.image,
            name=name,
            entrypoint=argv,
            command=[],
            user=f"{os.getuid()}:{os.getgid()}",
            working_dir=str(job.workdir),
            hostname="sandbox",
            environment=self._environment(job),
            labels={OWNER_LABEL: owner_id()},
            host_config=config,
        )

    def _environment(self, job: Job) -> dict[str, str]:
        """The image's PATH behind the mounted node; nothing of the host."""
        assert job.image is not None
        if job.image not in self._env:
            self._env[job.image] = self._client.api.inspect_image(job.image)["Config"].get("Env") or []
        paths = [entry.removeprefix("PATH=") for entry in self._env[job.image] if entry.startswith("PATH=")]
        path = paths[0] if paths else "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return {"HOME": str(job.home), "LANG": "C.UTF-8", "PATH": f"{OPT}/node/bin:{path}", **job.env}

    async def _watch(self, name: str, job: Job, attached: Attached) -> str:
        """Until the job has ended, or has written too much (`disk_limit`)."""
        watches = [asyncio.create_task(attached.read_to_end())]
        if job.disk:
            watches.append(asyncio.create_task(wait_until_full(job.disk, job.limits.workspace_bytes)))
        if not job.limits.strict:
            watches.append(asyncio.create_task(self._wait_until_grown(name, job.limits.workspace_bytes)))
        try:
            done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            if watches[0] not in done:
                return "disk_limit"
            await self._exit_state(name)
            return ""
        finally:
            for task in watches:
                task.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    async def _wait_until_grown(self, name: str, limit_bytes: int) -> None:
        """Return once the container's own layer is larger than the limit."""
        while True:
            began = time.monotonic()
            await asyncio.sleep(SIZE_EVERY_S)
            found = await asyncio.to_thread(
                self._client.api.containers, all=True, size=True, filters={"name": f"^/{name}$"}
            )
            if any((one.get("SizeRw") or 0) > limit_bytes for one in found):
                return
            await asyncio.sleep(10 * max(0.0, time.monotonic() - began - SIZE_EVERY_S))

    async def _exit_state(self, name: str) -> dict[str, Any]:
        """The container's state once it has stopped; output may end a moment before, or long before."""
        pause_s = EXIT_POLL_S / 10
        while True:
            state: dict[str, Any] = (await asyncio.to_thread(self._client.api.inspect_container, name))["State"]
            if not state["Running"]:
                return state
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 1.0)

    async def _remove(self, name: str, creating: asyncio.Future[None]) -> None:
        """Remove the container, also one that was still being made when we were cancelled."""

        async def remove() -> None:
            with suppress(OSError):
                await asyncio.wait({creating})
                await asyncio.to_thread(self._client.api.remove_container, name, force=True, v=True)

        await surely(remove())


def connect(host: str | None) -> DockerClient:
    """A client of the daemon.

    Raises:
        SandboxUnavailable: no SDK, or no daemon.
    """
    try:
        import docker
    except ModuleNotFoundError:
        raise SandboxUnavailable("the sandbox docker needs its SDK: pip install 'turngate[docker]'") from None
    try:
        client = docker.DockerClient(base_url=host) if host else docker.from_env()
        client.ping()
    except (OSError, docker.errors.DockerException) as error:
        raise SandboxUnavailable(
            f"no Docker daemon answers at {host or os.environ.get('DOCKER_HOST', 'its usual socket')} ({error}); start "
            "dockerd, set docker_host, or choose the sandbox 'bubblewrap'"
        ) from error
    return client


def reap_containers(client: DockerClient) -> int:
    """Remove containers whose runner is dead; how many. Those of living runners, and of others, are left alone."""
    return remove_containers(client, is_dead)


def remove_containers(client: DockerClient, chosen: Any) -> int:
    """Remove the containers whose owner `chosen` says yes to."""
    count = 0
    for one in client.api.containers(all=True, filters={"label": OWNER_LABEL}):
        if chosen(one["Labels"].get(OWNER_LABEL, "")):
            with suppress(OSError):
                client.api.remove_container(one["Id"], force=True, v=True)
                count += 1
    return count


def _ulimits(limits: Limits) -> list[Any]:
    from docker.types import Ulimit

    wanted = {"nofile": limits.open_files, "fsize": limits.file_bytes, "cpu": limits.cpu_s, "core": 0}
    return [Ulimit(name=name, soft=value, hard=value) for name, value in wanted.items()]
