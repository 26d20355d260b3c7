"""Installing a harness: whole or not at all, once, and from a lock that names no host."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from turngate.harnesses import install as module
from turngate.harnesses import npm as npm_module
from turngate.harnesses.base import Harness
from turngate.harnesses.errors import InstallError, UnknownHarness
from turngate.harnesses.install import MARKER, install
from turngate.harnesses.pi import Pi
from turngate.harnesses.registry import get_harness, list_harnesses


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


def test_an_unknown_harness_is_told_which_there_are() -> None:
    with pytest.raises(UnknownHarness, match="pi"):
        get_harness("no-such")


@pytest.mark.harness
def test_the_installed_pi_says_its_pinned_version(pi_installed: module.Installed) -> None:
    import subprocess

    cli = pi_installed.package / "node_modules" / Pi().package / "dist" / "bundle" / "cli.js"
    done = subprocess.run([pi_installed.node / "bin" / "node", cli, "--version"], capture_output=True, text=True)
    assert Pi().version in done.stdout + done.stderr
