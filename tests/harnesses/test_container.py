"""The Docker sandbox on a daemon of the tests' own: images, isolation, limits, pi inside, and what is left after."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

import docker
import pytest

from tests.dockerd import BASE, make_base, own_daemon
from tests.gateway_process import GatewayProcess
from tests.harnesses.conftest import TaskMaker
from tests.harnesses.doubles import BookGateway, ScriptHarness
from tests.harnesses.test_sandbox import CONNECT, echo_server
from turngate.harnesses.base import Harness
from turngate.harnesses.container import Docker
from turngate.harnesses.errors import Fault, SandboxUnavailable
from turngate.harnesses.images import OWNER_LABEL, bases, content_hash, unpack
from turngate.harnesses.install import Installed
from turngate.harnesses.owner import owner_id
from turngate.harnesses.patient import PatientGateway
from turngate.harnesses.pi import Pi
from turngate.harnesses.reap import reap
from turngate.harnesses.rollout import Stage, run_rollout
from turngate.harnesses.sandbox import OPT, Finished, Job, Limits, Mount
from turngate.harnesses.settings import RunSettings
from turngate.harnesses.spawn import DOOR_PORT
from turngate.harnesses.workspace import Scratch

WORK = PurePosixPath("/workspace")
DOCKERFILE = f"FROM {BASE}\nWORKDIR /workspace\nCOPY in.txt data/\nRUN echo made >/made\n"


@pytest.fixture(scope="module")
def daemon() -> Iterator[str]:
    """A daemon's address; the base image is there."""
    with own_daemon() as address:
        client = docker.DockerClient(base_url=address)
        make_base(client)
        client.close()
        yield address


@pytest.fixture
def client(daemon: str) -> Iterator[docker.DockerClient]:
    """A client of it."""
    found = docker.DockerClient(base_url=daemon)
    yield found
    found.close()


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Scratch]:
    """A run's own folder."""
    with Scratch(tmp_path / "scratch") as made:
        yield made


@pytest.fixture
def box(daemon: str, scratch: Scratch) -> Iterator[Docker]:
    """The sandbox, with the base image for tasks without a Dockerfile."""
    made = Docker(scratch.root / "docker", host=daemon, image=BASE, network="none")
    yield made
    made.close()


async def shell(
    box: Docker,
    script: str,
    folder: Path,
    *,
    node: Path | None = None,
    gateway: tuple[str, int] | None = None,
    deadline_s: float = 60.0,
    limits: Limits | None = None,
) -> Finished:
    """Run a shell script with `folder` as its workspace."""
    mounts = [Mount(folder, WORK, writable=True)]
    if node is not None:
        mounts.append(Mount(node, OPT / "node"))
    argv = ["bash", "-c", script]
    job = Job(argv, {}, mounts, PurePosixPath("/tmp"), WORK, deadline_s, gateway, limits or Limits(), image=BASE)
    return await box.run(job)


def containers(client: docker.DockerClient) -> int:
    """How many containers of ours there are, running or not."""
    return len(client.api.containers(all=True, filters={"label": OWNER_LABEL}))


async def test_output_and_status_come_back_and_nothing_is_left(
    box: Docker, client: docker.DockerClient, tmp_path: Path
) -> None:
    done = await shell(box, "(sleep 1000 &) ; echo out; echo err >&2; touch made; exit 3", tmp_path)
    assert (done.exit_code, done.stdout, done.stderr, done.timed_out) == (3, "out\n", "err\n", False)
    assert (tmp_path / "made").exists()
    assert containers(client) == 0


async def test_the_gateway_is_reached_through_the_door_and_nothing_else_is(
    box: Docker, pi_installed: Installed, tmp_path: Path
) -> None:
    async with echo_server() as allowed, echo_server() as other:
        ask = CONNECT.format(port=DOOR_PORT)
        assert (await shell(box, ask, tmp_path, node=pi_installed.node, gateway=allowed)).stdout == "echo hello\n"
        assert (await shell(box, ask, tmp_path)).exit_code == 1
        tries = "; ".join(f"({CONNECT.format(port=port)})" for port in (allowed[1], other[1]))
        done = await shell(
            box, f"{tries}; tail -n +3 /proc/net/dev | cut -d: -f1; getent hosts example.com || echo none", tmp_path
        )
        assert done.stdout.split() == ["lo", "none"]


async def test_the_hosts_environment_and_files_are_invisible_and_no_right_is_left(
    box: Docker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET_OF_THE_HOST", "tell no one")
    secret = tmp_path.parent / "secret-file"
    secret.write_text("tell no one")
    script = (
        f"env; cat {secret}; cat /proc/*/environ; grep CapEff /proc/self/status; mknod dev b 7 0; mount -t tmpfs x /mnt"
    )
    done = await shell(box, script, tmp_path)
    assert "tell no one" not in done.stdout + done.stderr
    assert "CapEff:\t0000000000000000" in done.stdout
    assert not (tmp_path / "dev").exists()


async def test_limits_are_held_by_the_daemon(box: Docker, tmp_path: Path) -> None:
    many = await shell(box, "for i in $(seq 50); do sleep 3 & done", tmp_path, limits=Limits(processes=20))
    assert "Resource temporarily unavailable" in many.stderr
    eat = "python3 -c 'x = bytearray(300 << 20)'"
    assert (await shell(box, eat, tmp_path, limits=Limits(memory_bytes=100 << 20))).exit_code == 137
    full = await shell(box, "yes > /tmp/full", tmp_path, limits=Limits(workspace_bytes=1 << 20))
    assert "No space left" in full.stderr
    strict = Limits(strict=True)
    assert box.unenforced(strict) == []
    assert "Read-only" in (await shell(box, "touch /elsewhere", tmp_path, limits=strict)).stderr


async def test_what_is_written_outside_the_workspace_ends_the_job(
    box: Docker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turngate.harnesses.container.SIZE_EVERY_S", 0.2)
    done = await shell(box, "yes | head -c 3000000 >/big; sleep 60", tmp_path, limits=Limits(workspace_bytes=1 << 20))
    assert done.exceeded == "disk_limit"


async def test_deadline_and_cancellation_leave_no_container(
    box: Docker, client: docker.DockerClient, tmp_path: Path
) -> None:
    done = await shell(box, "trap '' TERM INT; echo begun; while :; do sleep 1; done", tmp_path, deadline_s=3.0)
    assert (done.timed_out, done.stdout) == (True, "begun\n")
    job = asyncio.create_task(shell(box, "touch started; sleep 1000", tmp_path))
    while not (tmp_path / "started").exists():
        await asyncio.sleep(0.02)
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job
    assert containers(client) == 0


async def test_output_beyond_the_limit_is_dropped_without_blocking(box: Docker, tmp_path: Path) -> None:
    done = await shell(box, "yes | head -c 3000000; echo end >&2", tmp_path, limits=Limits(output_bytes=1024))
    assert (len(done.stdout), done.stderr, done.exit_code) == (1024, "end\n", 0)


async def test_an_image_is_built_once_by_content_and_its_files_become_the_workspace(
    box: Docker, client: docker.DockerClient, make_task: TaskMaker
) -> None:
    first = make_task("true", environment={"Dockerfile": DOCKERFILE, "in.txt": "7"})
    same = make_task("true", environment={"Dockerfile": DOCKERFILE, "in.txt": "7"})
    other = make_task("true", environment={"Dockerfile": DOCKERFILE, "in.txt": "8"})
    grounds = await asyncio.gather(*(box.prepare(task) for task in (first, first, same, other)))
    assert grounds[0] == grounds[1] == grounds[2] != grounds[3]
    assert grounds[0].files is not None
    assert (grounds[0].files / "data" / "in.txt").read_text() == "7"
    made = client.api.inspect_image(grounds[0].image)["Created"]
    (same.environment / "in.txt").touch()
    assert (await box.prepare(same)).image == grounds[0].image
    assert client.api.inspect_image(grounds[0].image)["Created"] == made
    assert content_hash(first.environment) == content_hash(same.environment) != content_hash(other.environment)


async def test_a_base_that_is_missing_and_a_build_that_fails_are_named(box: Docker, make_task: TaskMaker) -> None:
    missing = make_task("true", environment={"Dockerfile": "FROM nowhere/nothing:1\n"})
    with pytest.raises(Fault, match="docker pull nowhere/nothing:1"):
        await box.prepare(missing)
    broken = make_task("true", environment={"Dockerfile": f"FROM {BASE}\nRUN echo so it is; exit 3\n"})
    with pytest.raises(Fault, match="so it is"):
        await box.prepare(broken)


def test_the_bases_of_a_dockerfile_are_found() -> None:
    text = "ARG V=1\nFROM --platform=x a:1 AS build\nfrom build as b2\nFROM scratch\nFROM x$V\nFROM b:2\nRUN FROM\n"
    assert bases(text) == ["a:1", "b:2"]


def archive_of(*members: tuple[str, bytes, str, int]) -> tarfile.TarFile:
    """An archive of members with name, type, target of the link, mode; each file says `text`."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        for name, kind, target, mode in members:
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname, entry.mode = kind, target, mode
            entry.size = 4 if kind == tarfile.REGTYPE else 0
            archive.addfile(entry, io.BytesIO(b"text"))
    raw.seek(0)
    return tarfile.open(fileobj=raw)


def test_what_an_image_holds_is_unpacked_inside_and_with_harmless_modes(tmp_path: Path) -> None:
    folder, file = ("w", tarfile.DIRTYPE, "", 0o1777), ("w/a", tarfile.REGTYPE, "", 0o4777)
    link, rooted = ("w/b", tarfile.SYMTYPE, "a", 0o777), ("/w/c", tarfile.REGTYPE, "", 0o600)
    unpack(archive_of(folder, file, link, rooted), tmp_path)
    assert [(tmp_path / "w" / name).read_text() for name in "abc"] == ["text"] * 3
    assert [(tmp_path / name).stat().st_mode & 0o7777 for name in ("w", "w/a", "w/c")] == [0o755, 0o755, 0o600]


@pytest.mark.parametrize("name", ["../out", "w/../../out", "w/link/out"])
def test_what_leads_out_of_its_folder_is_not_unpacked(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    link = ("w/link", tarfile.SYMTYPE, str(tmp_path), 0o777)
    with pytest.raises(Fault, match="leads out"):
        unpack(archive_of(("w", tarfile.DIRTYPE, "", 0o755), link, (name, tarfile.REGTYPE, "", 0o644)), folder)
    assert not (tmp_path / "out").exists()


def docker_stage(
    box: Docker, scratch: Scratch, harness: Harness, installed: Installed, gateway: object, **settings: object
) -> Stage:
    chosen = RunSettings.model_validate({"sandbox": "docker", **settings})
    return Stage(chosen, harness, installed, box, gateway, scratch)  # type: ignore[arg-type]


async def test_the_verifier_runs_in_a_container_of_its_own_without_the_agents_processes(
    box: Docker, scratch: Scratch, pi_installed: Installed, make_task: TaskMaker
) -> None:
    test_sh = "set -e; ! test -e /left; grep -q 7 data/in.txt; cat /made; test $(ls -d /proc/[0-9]* | wc -l) -lt 6"
    test_sh += "; echo 1 > /logs/verifier/reward.txt"
    task = make_task(test_sh, environment={"Dockerfile": DOCKERFILE, "in.txt": "7"})
    loop = "while :; do echo 0 >/logs/verifier/reward.txt; done"
    script = f"touch /left; mkdir -p /logs/verifier; (setsid bash -c '{loop}' &)"
    stage = docker_stage(box, scratch, ScriptHarness(f"{script}; cat /made"), pi_installed, BookGateway())
    result = await run_rollout(stage, task, "group")
    assert (result.outcome, result.reward) == ("scored", 1.0), result


@pytest.mark.harness
async def test_pi_runs_in_it(
    box: Docker,
    scratch: Scratch,
    pi_installed: Installed,
    serve: Callable[..., GatewayProcess],
    make_task: TaskMaker,
) -> None:
    call = {"name": "bash", "arguments": {"command": "cp data/in.txt out.txt"}}
    gateway = serve([{"content": "", "tool_calls": [call]}, "Done."])
    task = make_task(
        "grep -q 7 out.txt && echo 1 > /logs/verifier/reward.txt",
        environment={"Dockerfile": DOCKERFILE, "in.txt": "7"},
    )
    patient = PatientGateway(gateway.client, 10.0)
    result = await run_rollout(docker_stage(box, scratch, Pi(), pi_installed, patient), task, "group")
    assert (result.outcome, result.reward, result.turns) == ("scored", 1.0, 2), result


def test_containers_of_dead_runners_are_reaped_and_those_of_living_ones_are_not(
    daemon: str, client: docker.DockerClient, tmp_path: Path
) -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    owners = {"living": owner_id(sleeper.pid), "own": owner_id(), "elsewhere": "other-1.2.3"}
    dead = subprocess.Popen(["sleep", "600"])
    owners["dead"] = owner_id(dead.pid)
    dead.kill()
    dead.wait()
    for name, owner in owners.items():
        client.api.create_container(BASE, ["sleep", "600"], name=name, labels={OWNER_LABEL: owner})
        client.api.start(name)
    assert reap(tmp_path, daemon)["containers"] == 1
    left = {one["Names"][0] for one in client.api.containers(filters={"label": OWNER_LABEL})}
    assert left == {"/living", "/own", "/elsewhere"}
    sleeper.kill()
    sleeper.wait()
    Docker(tmp_path / "next", host=daemon).check()
    left = {one["Names"][0] for one in client.api.containers(filters={"label": OWNER_LABEL})}
    assert left == {"/own", "/elsewhere"}, "the next runner's start reaps too"
    for name in ("own", "elsewhere"):
        client.api.remove_container(name, force=True)


def test_without_a_daemon_the_words_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(SandboxUnavailable, match="start dockerd"):
        Docker(tmp_path, host=f"unix://{tmp_path}/none.sock")
    assert "not looked at" in str(reap(tmp_path, f"unix://{tmp_path}/none.sock")["containers"])
