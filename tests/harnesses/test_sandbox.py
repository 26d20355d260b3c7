"""What a sandboxed job can and cannot do, tried by jobs that try it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path, PurePosixPath

import psutil
import pytest

from turngate.harnesses.bubblewrap import Bubblewrap
from turngate.harnesses.cgroups import Cgroups, own_places, reap_cgroups
from turngate.harnesses.enclosed import HOME
from turngate.harnesses.owner import PREFIX, owner_id
from turngate.harnesses.process import PlainProcess
from turngate.harnesses.sandbox import Finished, Job, Limits, Mount, Sandbox
from turngate.harnesses.spawn import DOOR_PORT

WORK = PurePosixPath("/workspace")


async def shell(
    script: str,
    folder: Path,
    *,
    sandbox: Sandbox | None = None,
    gateway: tuple[str, int] | None = None,
    deadline_s: float = 60.0,
    limits: Limits | None = None,
    disk: tuple[Path, ...] = (),
) -> Finished:
    """Run a shell script with `folder` as its workspace."""
    box = sandbox or Bubblewrap()
    home = folder / "home"
    home.mkdir(exist_ok=True)
    places = box.places(None, home, folder, WORK)
    mounts = [Mount(home, HOME, writable=True), Mount(folder, WORK, writable=True)]
    argv = ["bash", "-c", script]
    job = Job(argv, {}, mounts, places.home, places.workspace, deadline_s, gateway, limits or Limits(), disk=disk)
    return await box.run(job)


@asynccontextmanager
async def echo_server() -> AsyncIterator[tuple[str, int]]:
    """A server on the host that says back one line."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"echo " + await reader.readline())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[:2]


CONNECT = "exec 3<>/dev/tcp/127.0.0.1/{port} && echo hello >&3 && cat <&3"


async def test_the_gateway_is_reached_through_the_door_and_nothing_else_is(tmp_path: Path) -> None:
    async with echo_server() as allowed, echo_server() as other:
        done = await shell(CONNECT.format(port=DOOR_PORT), tmp_path, gateway=allowed)
        assert done.stdout == "echo hello\n"
        for port in (allowed[1], other[1]):
            done = await shell(CONNECT.format(port=port), tmp_path, gateway=allowed)
            assert (done.stdout, done.exit_code) == ("", 1)


async def test_without_a_gateway_there_is_no_door(tmp_path: Path) -> None:
    assert (await shell(CONNECT.format(port=DOOR_PORT), tmp_path)).exit_code == 1


async def test_there_is_no_dns_and_no_interface_but_loopback(tmp_path: Path) -> None:
    done = await shell("tail -n +3 /proc/net/dev | cut -d: -f1; getent hosts example.com || echo none", tmp_path)
    assert done.stdout.split() == ["lo", "none"]


async def test_the_hosts_environment_and_files_are_invisible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET_OF_THE_HOST", "tell no one")
    secret = tmp_path.parent / "secret-file"
    secret.write_text("tell no one")
    done = await shell(f"env; cat {secret}; ls -A / /home /tmp; cat /proc/*/environ", tmp_path)
    assert "tell no one" not in done.stdout + done.stderr
    assert str(Path.home()) not in done.stdout.splitlines()
    assert "HOME=/home/agent" in done.stdout


async def test_the_hosts_processes_are_invisible(tmp_path: Path) -> None:
    done = await shell("ls -d /proc/[0-9]* | wc -l", tmp_path)
    assert int(done.stdout) < 10


@pytest.mark.parametrize("path", ["/usr/x", "/etc/x", "/x", "/opt/turngate/x"])
async def test_only_home_workspace_and_tmp_can_be_written(tmp_path: Path, path: str) -> None:
    done = await shell(f"touch ~/ok /workspace/ok /tmp/ok && touch {path}", tmp_path)
    assert done.exit_code != 0
    assert (tmp_path / "ok").exists()
    assert "Read-only" in done.stderr


async def test_every_process_is_gone_when_a_job_ends_also_detached_ones(tmp_path: Path) -> None:
    marker = f"{os.getpid()}{id(tmp_path) % 10_000}"
    done = await shell(f"setsid nohup sleep 99{marker} & sleep 0.2; disown -a; exit 3", tmp_path)
    assert done.exit_code == 3
    assert leftovers(f"99{marker}") == []


@pytest.mark.parametrize("sandbox", [Bubblewrap(), PlainProcess()], ids=lambda box: box.name)
async def test_the_deadline_ends_every_process(tmp_path: Path, sandbox: Sandbox) -> None:
    marker = f"98{os.getpid()}{id(tmp_path) % 10_000}"
    script = f"trap '' TERM INT; (trap '' TERM; setsid sleep {marker}) & sleep {marker}"
    done = await shell(script, tmp_path, sandbox=sandbox, deadline_s=1.5)
    assert done.timed_out
    assert leftovers(marker) == []


@pytest.mark.parametrize("sandbox", [Bubblewrap(), PlainProcess()], ids=lambda box: box.name)
async def test_a_cancelled_job_leaves_nothing(tmp_path: Path, sandbox: Sandbox) -> None:
    marker = f"97{os.getpid()}{id(tmp_path) % 10_000}"
    job = asyncio.create_task(shell(f"touch started; sleep {marker}", tmp_path, sandbox=sandbox))
    while not (tmp_path / "started").exists():
        await asyncio.sleep(0.02)
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job
    assert leftovers(marker) == []


async def test_output_beyond_the_limit_is_dropped_without_blocking(tmp_path: Path) -> None:
    done = await shell("yes | head -c 5000000; echo end >&2", tmp_path, limits=Limits(output_bytes=1024))
    assert (len(done.stdout), done.stderr, done.exit_code) == (1024, "end\n", 0)


async def test_a_file_cannot_grow_beyond_the_limit(tmp_path: Path) -> None:
    await shell("yes > big", tmp_path, limits=Limits(file_bytes=100_000))
    assert (tmp_path / "big").stat().st_size <= 100_000


async def test_memory_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    done = await shell('python3 -c "bytearray(200 << 20)"', tmp_path, limits=Limits(memory_bytes=100 << 20))
    assert "MemoryError" in done.stderr


@pytest.mark.parametrize("sandbox", [Bubblewrap(), PlainProcess()], ids=lambda box: box.name)
async def test_without_cgroups_each_process_has_limits_of_its_own(tmp_path: Path, sandbox: Sandbox) -> None:
    limits = Limits(open_files=77, cpu_s=88, processes=99, memory_bytes=100 << 20, file_bytes=1 << 20)
    done = await shell(
        "ulimit -Hn; ulimit -Ht; ulimit -Hu; ulimit -Hd; ulimit -Hf", tmp_path, sandbox=sandbox, limits=limits
    )
    assert done.stdout.split() == ["77", "88", "99", str(100 << 10), str(1 << 10)]
    burnt = "python3 -c 'while True: pass'"
    assert (await shell(burnt, tmp_path, sandbox=sandbox, limits=Limits(cpu_s=1))).exit_code != 0


@pytest.mark.parametrize("sandbox", [Bubblewrap(), PlainProcess()], ids=lambda box: box.name)
async def test_a_job_gives_way_to_what_is_outside(tmp_path: Path, sandbox: Sandbox) -> None:
    own = Path("/proc/self/autogroup")
    look = "nice; cat /proc/self/autogroup 2> /dev/null || echo no autogroups"
    for _ in range(20):  # the kernel refuses a second group within 100 ms, whoever on the machine asked for the first
        told = (await shell(look, tmp_path, sandbox=sandbox, limits=Limits(niceness=7))).stdout.splitlines()
        assert told[0] == str(max(7, os.nice(0)))
        if not own.exists() or told[1].endswith("nice 7"):
            break
    assert told[1].endswith("nice 7") == own.exists()
    assert (await shell("nice", tmp_path, sandbox=sandbox, limits=Limits(niceness=0))).stdout == f"{os.nice(0)}\n"


async def test_a_command_that_does_not_exist_is_status_127(tmp_path: Path) -> None:
    places = Bubblewrap().places(None, tmp_path, tmp_path, WORK)
    job = Job(["/no/such"], {}, [Mount(tmp_path, WORK)], places.home, WORK, 30.0)
    done = await Bubblewrap().run(job)
    assert done.exit_code == 127
    assert "/no/such" in done.stderr


def leftovers(marker: str) -> list[str]:
    """Command lines of living processes that contain `marker`, this process and the test's shell aside."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if any(marker in word for word in words) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(" ".join(words))
    return found


# --- limits of a whole sandbox -------------------------------------------------------------------------------------


@pytest.fixture
def cgroups() -> Iterator[Cgroups]:
    """What this user may make; these tests need root, as CI has."""
    found = Cgroups.find()
    assert found.held == {"pids", "memory", "cpu"}, "no writable cgroups here"
    yield found
    found.close()


BOXES = [Bubblewrap, PlainProcess]
FORK = """python3 -c '
import os, time
made = []
try:
    for _ in range(100):
        made.append(os.fork())
        if not made[-1]:
            time.sleep(60)
except BlockingIOError:
    print(len(made))
'
"""
EAT = "python3 -c 'import os, time; [os.fork() for _ in range(3)]; x = bytearray(40 << 20); time.sleep(1)'"
BURN = """python3 -c '
import time
end = time.monotonic() + 1.5
while time.monotonic() < end: pass
print(time.process_time())
'
"""


@pytest.mark.parametrize("kind", BOXES)
async def test_processes_and_memory_of_a_sandbox_are_held_by_its_cgroup(
    tmp_path: Path, cgroups: Cgroups, kind: type[Bubblewrap]
) -> None:
    box = kind(cgroups)
    many = await shell(FORK, tmp_path, sandbox=box, limits=Limits(processes=30), deadline_s=30)
    assert 10 < int(many.stdout) < 30
    eaten = await shell(EAT, tmp_path, sandbox=box, limits=Limits(memory_bytes=150 << 20))
    assert eaten.oom_kills > 0
    assert list_cgroups(cgroups) == []


@pytest.mark.parametrize("kind", BOXES)
async def test_cores_of_a_sandbox_are_held_by_its_cgroup(
    tmp_path: Path, cgroups: Cgroups, kind: type[Bubblewrap]
) -> None:
    burnt = await shell(BURN, tmp_path, sandbox=kind(cgroups), limits=Limits(cpus=0.2))
    assert 0.05 < float(burnt.stdout) < 0.9


async def test_a_sandbox_within_its_limits_is_not_touched(tmp_path: Path, cgroups: Cgroups) -> None:
    done = await shell("echo fine", tmp_path, sandbox=Bubblewrap(cgroups), limits=Limits(cpus=1.0))
    assert (done.stdout, done.oom_kills, done.exceeded) == ("fine\n", 0, "")


def list_cgroups(cgroups: Cgroups) -> list[Path]:
    """Folders of sandboxes that are there."""
    return [entry for parent in cgroups.folders for entry in parent.iterdir() if entry.is_dir()]


def test_what_cannot_be_held_is_said() -> None:
    lost = Bubblewrap().unenforced(Limits(cpus=1.0))
    assert [line.split(":")[0] for line in lost] == ["memory", "processes", "cpus"]
    assert any("isolation" in line for line in PlainProcess().unenforced(Limits()))


def test_cgroups_of_dead_runners_are_ended_and_removed_and_those_of_living_ones_are_not(cgroups: Cgroups) -> None:
    dead, living, inside = (subprocess.Popen(["sleep", "600"]) for _ in range(3))
    try:
        folders = {}
        for name, process in (("dead", dead), ("living", living)):
            folders[name] = cgroups.folders[0].parent / f"{PREFIX}{owner_id(process.pid)}"
            (folders[name] / "s1").mkdir(parents=True)
        (folders["dead"] / "s1" / "cgroup.procs").write_text(str(inside.pid))
        dead.kill()
        dead.wait()
        assert sum(reap_cgroups(place) for place in own_places()) == 1
        assert inside.wait(timeout=10) == -signal.SIGKILL
        assert not folders["dead"].exists()
        assert folders["living"].exists()
    finally:
        for process in (dead, living, inside):
            process.kill()
            process.wait()
        reap_cgroups(cgroups.folders[0].parent)
    assert not folders["living"].exists()


@pytest.mark.parametrize("sandbox", [Bubblewrap(), PlainProcess()], ids=lambda box: box.name)
async def test_a_job_cancelled_again_while_it_ends_leaves_nothing(tmp_path: Path, sandbox: Sandbox) -> None:
    marker = f"96{os.getpid()}{id(tmp_path) % 10_000}"
    job = asyncio.create_task(shell(f"trap '' TERM; touch started; sleep {marker}", tmp_path, sandbox=sandbox))
    while not (tmp_path / "started").exists():
        await asyncio.sleep(0.02)
    while not job.done():
        job.cancel()
        await asyncio.sleep(0)
    assert job.cancelled()
    assert leftovers(marker) == []


async def test_rollouts_do_not_see_one_another(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    async with echo_server() as gateway:
        hold = "echo 'tell no one' | tee secret ~/secret /tmp/secret /dev/shm/secret; exec -a tell-no-one sleep 60"
        first = asyncio.create_task(shell(hold, one, gateway=gateway))
        while not (one / "secret").exists():
            await asyncio.sleep(0.02)
        look = "cat /workspace/* ~/* /tmp/* /dev/shm/*; cat /proc/*/cmdline | tr '\\0' ' '; ls /home /tmp /dev/shm; "
        done = await shell(look + CONNECT.format(port=DOOR_PORT), two)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
    assert "secret" not in done.stdout
    assert "tell" not in done.stdout
    assert done.exit_code == 1, "the other's door is not on this loopback"


async def test_the_devices_folder_cannot_be_filled(tmp_path: Path) -> None:
    limits = Limits(workspace_bytes=1 << 20)
    done = await shell("yes > /dev/shm/full; echo x > /dev/full-of-it", tmp_path, limits=limits)
    assert "No space left" in done.stderr
    assert "Read-only" in done.stderr
