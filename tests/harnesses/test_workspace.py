"""Folders of rollouts: how much fits, what an agent can leave in them, and what a killed runner leaves."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harnesses.test_sandbox import shell
from turngate.harnesses import workspace
from turngate.harnesses.disk import used_bytes, wait_until_full
from turngate.harnesses.errors import Fault
from turngate.harnesses.sandbox import Limits
from turngate.harnesses.workspace import Scratch, copy_workspace, reap_scratch, remove_tree

SMALL = Limits(workspace_bytes=1 << 20)


async def test_a_workspace_on_its_own_file_system_is_full_at_its_size_and_the_agent_goes_on(tmp_path: Path) -> None:
    with Scratch(tmp_path, SMALL) as scratch:
        assert scratch.hard, "mounting needs root, as CI has"
        assert scratch.unenforced() == []
        folders = scratch.folders("r1", None)
        done = await shell("yes > big; echo $?; df -k . | tail -1; rm big; echo on", folders.workspace)
        assert "No space left" in done.stderr
        assert done.stdout.endswith("on\n")
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()


async def test_a_file_that_is_deleted_while_open_counts_too(tmp_path: Path) -> None:
    with Scratch(tmp_path, SMALL) as scratch:
        folders = scratch.folders("r1", None)
        done = await shell("exec 3>hidden; rm hidden; yes >&3; echo $?", folders.workspace)
    assert "No space left" in done.stderr


async def test_a_watched_workspace_ends_its_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turngate.harnesses.disk.LOOK_EVERY_S", 0.05)
    with Scratch(tmp_path, SMALL.model_copy(update={"disk": "watch"})) as scratch:
        assert not scratch.hard
        assert "deleted while open" in scratch.unenforced()[0]
        folders = scratch.folders("r1", None)
        watched = scratch.watched(folders.home, folders.workspace)
        done = await shell("yes | head -c 3000000 > big; sleep 60", folders.workspace, limits=SMALL, disk=watched)
    assert done.exceeded == "disk_limit"


def test_without_the_right_to_mount_it_is_watched_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(workspace, "mount_tmpfs", refuse)
    with Scratch(tmp_path, SMALL) as scratch:
        assert (scratch.hard, scratch.watched(tmp_path)) == (False, (tmp_path,))
    wanted = SMALL.model_copy(update={"disk": "tmpfs"})
    with pytest.raises(workspace.SandboxUnavailable, match="cannot mount"), Scratch(tmp_path, wanted):
        raise AssertionError
    assert list(tmp_path.iterdir()) == []


def test_files_that_do_not_fit_are_a_fault_and_leave_nothing(tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    (files / "big").write_bytes(b"x" * (2 << 20))
    with Scratch(tmp_path / "scratch", SMALL) as scratch:
        with pytest.raises(Fault, match="sandbox_start"):
            scratch.folders("r1", files)
        assert list(scratch.root.glob("r1*")) == []


def test_a_killed_runner_leaves_folders_and_mounts_that_the_next_one_removes(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from turngate.harnesses.workspace import Scratch\n"
        "scratch = Scratch(Path(sys.argv[1])).__enter__(); scratch.folders('r1', None); print('made', flush=True)\n"
        "time.sleep(600)"
    )
    runner = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert runner.stdout is not None
    assert runner.stdout.readline() == b"made\n"
    assert reap_scratch(tmp_path) == 0, "its owner lives"
    runner.kill()
    runner.wait()
    runner.stdout.close()
    assert str(tmp_path) in Path("/proc/self/mountinfo").read_text()
    assert reap_scratch(tmp_path) == 1
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_file_is_not_copied_and_links_are_copied_as_links(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of the host")
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "to-file").symlink_to(secret)
    (source / "to-folder").symlink_to(tmp_path)
    (source / "sub" / "loop").symlink_to("..")
    os.mkfifo(source / "pipe")
    os.mknod(source / "device", 0o600 | 0o060000, os.makedev(7, 0))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(source / "sock"))
    listener.close()
    (source / "one").write_text("1")
    os.link(source / "one", source / "two")
    (source / "setuid").write_text("#!")
    (source / "setuid").chmod(0o6755)
    copy_workspace(source, tmp_path / "copy", 1 << 20)
    made = {path.name: path for path in (tmp_path / "copy").rglob("*")}
    assert set(made) == {"sub", "to-file", "to-folder", "loop", "one", "two", "setuid"}
    assert made["to-file"].is_symlink()
    assert made["to-folder"].is_symlink()
    assert made["one"].stat().st_nlink == 1
    assert made["setuid"].stat().st_mode & 0o7000 == 0


@pytest.mark.parametrize("what", ["sparse", "many", "deep"])
def test_what_is_too_large_too_many_or_too_deep_is_invalid_and_can_be_removed(tmp_path: Path, what: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    if what == "sparse":
        with (source / "hole").open("wb") as file:
            file.truncate(1 << 40)
    elif what == "many":
        for number in range(300):
            (source / str(number)).mkdir()
    else:
        subprocess.run(
            [sys.executable, "-c", "import os\nfor _ in range(3000):\n os.mkdir('d'); os.chdir('d')"],
            cwd=source,
            check=True,
        )
    with pytest.raises(Fault, match="workspace_invalid"):
        copy_workspace(source, tmp_path / "copy", 1 << 20)
    for folder in (source, tmp_path / "copy"):
        remove_tree(folder)
        assert not folder.exists()


def test_what_folders_occupy_is_what_their_blocks_are(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 100_000)
    with (tmp_path / "hole").open("wb") as file:
        file.truncate(1 << 30)
    (tmp_path / "link").symlink_to("/usr")
    used = used_bytes([tmp_path])
    assert used is not None
    assert 100_000 <= used < 200_000


async def test_a_folder_that_hides_its_size_counts_as_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turngate.harnesses.disk.used_bytes", lambda folders: None)
    await asyncio.wait_for(wait_until_full([tmp_path], 1 << 30), 30)
