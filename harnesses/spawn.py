"""Starting a sandboxed command, collecting its output, and ending it for certain: shared by all local sandboxes.

The command begins with `launcher.py`, which waits for a word on the control socket; a runner that died before saying
it leaves nothing behind. Output beyond the limit is read and dropped, so a chatty job never blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from turngate.harnesses.cgroups import Cgroup, Cgroups
from turngate.harnesses.disk import wait_until_full
from turngate.harnesses.errors import Fault
from turngate.harnesses.relay import Relay
from turngate.harnesses.sandbox import Finished, Job, Limits
from turngate.harnesses.surely import surely

DOOR_PORT = 8642
LAUNCHER = Path(__file__).with_name("launcher.py")
START_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Spawn:
    """A command line built around the launcher. `end` asks the processes to go; it may be called more than once."""

    argv: Sequence[str]
    env: dict[str, str]
    pass_fds: Sequence[int]
    cwd: str | None
    end: Callable[[int, socket.socket], None]
    gone: Callable[[], asyncio.Future[None] | None]


def launcher_words(control_fd: int, job: Job, *, port: int, guard: bool) -> list[str]:
    """The arguments that `launcher.py` takes."""
    limits = ",".join(f"{name}={value}" for name, value in _rlimits(job.limits).items())
    return [str(control_fd), str(port), "1" if guard else "0", str(job.limits.niceness), limits, *job.argv]


def _rlimits(limits: Limits) -> dict[str, int]:
    return {
        "DATA": limits.memory_bytes,
        "FSIZE": limits.file_bytes,
        "NPROC": limits.processes,
        "NOFILE": limits.open_files,
        "CPU": limits.cpu_s,
        "CORE": 0,
    }


def unheld(cgroups: Cgroups, limits: Limits) -> list[str]:
    """What a local sandbox cannot hold, a sentence each."""
    lost = []
    if "memory" not in cgroups.held:
        lost.append("memory: held for each process, not for a sandbox (no writable memory cgroup)")
    if "pids" not in cgroups.held:
        why = "not held, the kernel exempts root" if os.geteuid() == 0 else "held for this user, not for a sandbox"
        lost.append(f"processes: {why} (no writable pids cgroup)")
    if limits.cpus is not None and "cpu" not in cgroups.held:
        lost.append("cpus: not held (no writable cpu cgroup)")
    return lost


async def in_cgroup(cgroups: Cgroups, limits: Limits, run: Callable[[Cgroup], Awaitable[Finished]]) -> Finished:
    """Run in a cgroup of its own, which is gone afterwards with whatever was in it.

    Raises:
        Fault: `sandbox_start` when the cgroup cannot be made.
    """
    try:
        cgroup = cgroups.make(limits)
    except OSError as error:
        raise Fault("sandbox_start", f"cannot make a cgroup: {error}") from error
    try:
        done = await run(cgroup)
        return replace(done, oom_kills=cgroup.oom_kills())
    finally:
        await surely(asyncio.to_thread(cgroup.remove))


async def run_spawned(job: Job, spawn: Spawn, control: socket.socket) -> Finished:
    """Run `spawn` for `job`; `control` is the runner's end of the launcher's socket pair.

    Raises:
        Fault: `sandbox_start` when the launcher never reported.
    """
    began = time.monotonic()
    control.setblocking(False)
    process = await asyncio.create_subprocess_exec(
        *spawn.argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=spawn.env,
        cwd=spawn.cwd,
        pass_fds=tuple(spawn.pass_fds),
        start_new_session=True,
    )
    for fd in spawn.pass_fds:
        os.close(fd)
    assert process.stdout is not None
    assert process.stderr is not None
    out = asyncio.create_task(_collect(process.stdout, job.limits.output_bytes))
    err = asyncio.create_task(_collect(process.stderr, job.limits.output_bytes))
    timed_out, exceeded = False, ""
    try:
        async with asyncio.timeout(job.deadline_s):
            exceeded = await unless_full(job, _serve(job, control, process, err))
    except TimeoutError:
        timed_out = True
    finally:
        await surely(_finish(process, spawn, control))
    stdout, stderr = await out, await err
    return Finished(process.returncode or 0, stdout, stderr, timed_out, time.monotonic() - began, exceeded)


async def unless_full(job: Job, serving: Coroutine[None, None, None]) -> str:
    """Serve to the end, or until the job's disk is full; `disk_limit` then, else nothing."""
    if not job.disk:
        await serving
        return ""
    serve = asyncio.create_task(serving)
    watch = asyncio.create_task(wait_until_full(job.disk, job.limits.workspace_bytes))
    try:
        done, _ = await asyncio.wait({serve, watch}, return_when=asyncio.FIRST_COMPLETED)
        if serve in done:
            serve.result()
            return ""
        watch.result()
        return "disk_limit"
    finally:
        for task in (serve, watch):
            task.cancel()
        await asyncio.gather(serve, watch, return_exceptions=True)


async def _serve(job: Job, control: socket.socket, process: asyncio.subprocess.Process, err: asyncio.Task[str]) -> None:
    """Take the launcher's report, let it go on, and relay until the process ends."""
    door = await _report(control)
    if door is None:
        await process.wait()
        raise Fault("sandbox_start", f"status {process.returncode}: {(await err).strip()[-500:]}")
    with contextlib.ExitStack() as stack:
        if isinstance(door, socket.socket):
            stack.callback(door.close)
        loop = asyncio.get_running_loop()
        if isinstance(door, socket.socket) and job.gateway is not None:
            async with Relay(door, job.gateway):
                await loop.sock_sendall(control, b"G")
                await process.wait()
        else:
            await loop.sock_sendall(control, b"G")
            await process.wait()


async def _report(control: socket.socket) -> socket.socket | bool | None:
    """The listening socket, True for a job without a door, None when the launcher died."""
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    loop.add_reader(control, _settle, readable)
    try:
        await asyncio.wait_for(readable, START_TIMEOUT_S)
    except TimeoutError:
        raise Fault("sandbox_start", f"no sign of life within {START_TIMEOUT_S:.0f} s") from None
    finally:
        loop.remove_reader(control)
    try:
        word, fds, _, _ = socket.recv_fds(control, 1, 1)
    except OSError:
        return None
    if word == b"L" and fds:
        door = socket.socket(fileno=fds[0])
        door.setblocking(False)
        return door
    return True if word == b"R" else None


async def _finish(process: asyncio.subprocess.Process, spawn: Spawn, control: socket.socket) -> None:
    """End whatever is left and wait until the kernel confirms it."""
    spawn.end(process.pid, control)
    await process.wait()
    gone = spawn.gone()
    if gone is not None:
        await gone
    control.close()


async def _collect(stream: asyncio.StreamReader, limit_bytes: int) -> str:
    """All output up to `limit_bytes`; the rest is read and dropped."""
    kept = bytearray()
    while data := await stream.read(1 << 16):
        kept += data[: max(0, limit_bytes - len(kept))]
    return kept.decode("utf-8", "replace")


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def kill_group(pid: int) -> None:
    """SIGKILL the process group that `pid` leads, if it is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
