"""Installing a harness: whole or not at all, once, and from a lock that names no host."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from turngate.harnesses import install as module
from turngate.harnesses import npm as npm_module
from turngate.harnesses.base import Harness
from turngate.harnesses.claude_code import ClaudeCode
from turngate.harnesses.codex import BINARY, Codex
from turngate.harnesses.errors import InstallError, UnknownHarness
from turngate.harnesses.gemini_cli import GeminiCli
from turngate.harnesses.harnesses_command import harnesses_command
from turngate.harnesses.install import MARKER, install, install_state
from turngate.harnesses.opencode import OpenCode
from turngate.harnesses.pi import Pi
from turngate.harnesses.registry import get_harness, list_harnesses
from turngate.tasks.errors import TaskInvalid
from turngate.tasks.resolve import task_folder


@pytest.fixture
def npm(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """npm replaced by one that makes the package's folder; the folders it was run in."""
    calls: list[Path] = []

    def fake(folder: Path, node: Path) -> None:
        calls.append(folder)
        assert (folder / "package-lock.json").exists()
        package = folder / "node_modules" / Pi().package
        package.mkdir(parents=True)
        (package / "package.json").write_text(json.dumps({"version": Pi().version}))

    monkeypatch.setattr(npm_module, "install", fake)
    return calls


def test_the_second_call_needs_no_npm(npm: list[Path], tmp_path: Path) -> None:
    first = install(Pi(), tmp_path)
    assert install(Pi(), tmp_path) == first
    assert len(npm) == 1
    assert (first.package / "node_modules" / Pi().package / "package.json").exists()
    assert (first.node / "bin" / "node").exists()


def test_two_installers_at_once_install_once(npm: list[Path], tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: install(Pi(), tmp_path).package, range(4)))
    assert (len(found), len(npm)) == (1, 1)


def test_a_failed_or_interrupted_install_leaves_nothing_that_counts(
    npm: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(folder: Path, node: Path) -> None:
        (folder / "node_modules").mkdir()
        raise InstallError("npm ci failed with status 1")

    with monkeypatch.context() as patch:
        patch.setattr(npm_module, "install", broken)
        with pytest.raises(InstallError):
            install(Pi(), tmp_path)
    target = tmp_path / "harnesses" / f"pi-{Pi().version}"
    assert not target.exists()
    target.mkdir()
    (target.parent / f".{target.name}-left").mkdir()
    install(Pi(), tmp_path)
    assert (target / MARKER).exists()
    assert sorted(path.name for path in target.parent.iterdir()) == [target.name, f"{target.name}.lock"]
    assert len(npm) == 1


def test_a_changed_lock_installs_again(npm: list[Path], tmp_path: Path) -> None:
    package = install(Pi(), tmp_path).package
    marker = json.loads((package / MARKER).read_text())
    (package / MARKER).write_text(json.dumps({**marker, "lock": "another"}))
    install(Pi(), tmp_path)
    assert len(npm) == 2


@pytest.mark.parametrize("harness", [one for one in list_harnesses() if one.source == "npm"], ids=lambda one: one.name)
def test_every_npm_lock_pins_every_package_by_integrity_and_names_no_host(harness: Harness) -> None:
    lock = json.loads(module.template(harness, "package-lock.json"))
    packages = {name: entry for name, entry in lock["packages"].items() if name}
    assert packages[f"node_modules/{harness.package}"]["version"] == harness.version
    assert all("integrity" in entry and "resolved" not in entry for entry in packages.values())
    wanted = json.loads(module.template(harness, "package.json"))["dependencies"]
    assert wanted == {harness.package: harness.version}


@pytest.mark.parametrize("harness", [one for one in list_harnesses() if one.source == "pypi"], ids=lambda one: one.name)
def test_every_python_lock_holds_a_hash_for_every_package_and_no_host(harness: Harness) -> None:
    lock = module.template(harness, "requirements.lock")
    pins = [line for line in lock.splitlines() if line and not line.startswith((" ", "#"))]
    assert f"{harness.package}=={harness.version} \\" in pins
    assert all("==" in pin and pin.endswith("\\") for pin in pins)
    assert "://" not in lock


KILLED_MIDWAY = """
import os, pathlib, signal, sys
from turngate.harnesses import npm
from turngate.harnesses.install import install
from turngate.harnesses.pi import Pi
def half(folder, node):
    package = folder / "node_modules" / Pi().package
    package.mkdir(parents=True)
    (package / "package.json").write_text('{"version": "%s"}' % Pi().version)
    os.kill(os.getpid(), signal.SIGKILL)
npm.install = half
install(Pi(), pathlib.Path(sys.argv[1]))
"""


def test_an_installer_that_was_killed_counts_for_nothing_and_the_next_one_succeeds(
    npm: list[Path], tmp_path: Path
) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED_MIDWAY, str(tmp_path)])
    assert done.returncode == -signal.SIGKILL
    assert install_state(Pi(), tmp_path) == "absent"
    install(Pi(), tmp_path)
    assert install_state(Pi(), tmp_path) == "installed"
    assert len(list((tmp_path / "harnesses").iterdir())) == 2, "the torn one is gone"


@pytest.mark.harness
@pytest.mark.parametrize("harness", [one for one in list_harnesses() if one.source != "none"], ids=lambda one: one.name)
def test_an_installed_harness_starts_and_counts_as_installed_without_a_network(harness: Harness) -> None:
    there = install(harness)
    assert there is not None
    offline = ["bwrap", "--unshare-net", "--dev-bind", "/", "/"]
    again = [sys.executable, "-m", "turngate.proxy.cli", "harnesses", "install", harness.name]
    done = subprocess.run([*offline, *again], capture_output=True, text=True)
    assert done.stdout == f"{harness.name} {harness.version}: installed\n", done.stderr
    modules = there.package / "node_modules"
    start = {
        "pi": [f"{there.node}/bin/node", str(modules / Pi().package / "dist" / "bundle" / "cli.js"), "--version"],
        "opencode": [str(modules / OpenCode().package / "bin" / "opencode"), "--version"],
        "codex": [str(modules / Codex().package / BINARY), "--version"],
        "claude-code": [str(modules / ClaudeCode().package / "claude"), "--version"],
        "gemini-cli": [
            f"{there.node}/bin/node",
            str(modules / GeminiCli().package / "bundle" / "gemini.js"),
            "--version",
        ],
        "mini-swe-agent": [str(there.python), "-S", "-c", "import minisweagent.run.mini as m; print(m.__package__)"],
        "openhands": [str(there.python), "-S", "-m", "openhands_cli.entrypoint", "--version"],
    }[harness.name]
    env = {"PYTHONPATH": str(there.package / "site"), "HOME": str(there.package.parent), "MSWEA_CONFIGURED": "true"}
    done = subprocess.run([*offline, *start], capture_output=True, text=True, env={**os.environ, **env})
    assert done.returncode == 0, done.stderr


def test_a_harness_is_one_file_of_at_most_150_lines_and_is_documented() -> None:
    docs = Path(__file__).parents[2] / "docs"
    for harness in list_harnesses():
        file = Path(sys.modules[type(harness).__module__].__file__ or "")
        assert len(file.read_text().splitlines()) <= 150, file
        assert f"`{harness.name}`" in (docs / "harnesses.md").read_text()
        assert harness.quirks


def test_the_list_says_what_is_installed(
    npm: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TURNGATE_CACHE", str(tmp_path))
    assert harnesses_command(["install", "pi", "chat"]) == 0
    capsys.readouterr()
    assert harnesses_command(["--json"]) == 0
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    states = {name: one["state"] for name, one in found.items()}
    assert (states["pi"], states["opencode"], states["chat"]) == ("installed", "absent", "needs none")
    assert (found["pi"]["version"], found["pi"]["dialect"]) == (Pi().version, "chat")
    assert harnesses_command(["install", "opencode", "nobody"]) == 2
    assert "choose one of" in capsys.readouterr().err
    assert len(npm) == 1, "nothing is installed of a list that holds a wrong name"


def test_a_cache_that_cannot_be_written_is_named_with_the_setting(npm: list[Path], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InstallError, match="set TURNGATE_CACHE"):
        install(Pi(), tmp_path / "file")
    with pytest.raises(TaskInvalid, match="set TURNGATE_CACHE"):
        task_folder("dataops:train", tmp_path / "file")


def test_an_unknown_harness_is_told_which_there_are() -> None:
    with pytest.raises(UnknownHarness, match="pi"):
        get_harness("no-such")
