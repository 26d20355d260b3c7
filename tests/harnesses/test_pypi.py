"""pip as the installer: whatever pip is here, a package is installed for the Python that will run it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from turngate.harnesses import pypi
from turngate.harnesses.errors import InstallError
from turngate.harnesses.install import template
from turngate.harnesses.openhands import OpenHands
from turngate.harnesses.pythons import base_python, find_python

OLD_PIP = "pip==23.0.1" if sys.version_info < (3, 12) else "pip"
"""What Debian 12 puts into a virtual environment: it breaks under Python 3.12."""

INSTALL = "import pathlib, sys; from turngate.harnesses import pypi; pypi.install(*map(pathlib.Path, sys.argv[1:]))"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where to install, with a lock of one package that has compiled parts."""
    made = tmp_path / "made"
    made.mkdir()
    lock = re.search(r"^markupsafe==.*\n(?: .*\n)+", template(OpenHands(), "requirements.lock"), re.MULTILINE)
    assert lock is not None
    (made / "requirements.lock").write_text(lock[0])
    return made


@pytest.mark.harness
def test_an_environment_whose_pip_is_old_installs_for_its_own_and_for_a_newer_python(
    folder: Path, tmp_path: Path
) -> None:
    subprocess.run([base_python(), "-I", "-m", "venv", tmp_path / "old"], check=True)
    old = tmp_path / "old" / "bin" / "python"
    subprocess.run([old, "-I", "-m", "pip", "install", "-q", OLD_PIP], check=True)
    (tmp_path / "path" / "turngate").mkdir(parents=True)
    (tmp_path / "path" / "turngate" / "harnesses").symlink_to(Path(pypi.__file__).parent)
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "path")}
    for python in (base_python(), find_python(OpenHands().python, "openhands")):
        done = subprocess.run([old, "-c", INSTALL, folder, python], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert sorted(one.name for one in folder.iterdir()) == ["requirements.lock", "site"]
        assert pypi.version_of(folder, "markupsafe")
        tag = python.name.replace("python", "cpython-").replace(".", "")
        assert list(folder.glob(f"site/markupsafe/_speedups.{tag}-*.so"))
        assert list(folder.glob(f"site/markupsafe/__pycache__/*.{tag}.pyc"))
        (folder / "site").rename(tmp_path / python.name)


def test_where_nothing_can_install_for_a_python_the_words_say_what_to_do(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python3.99"
    python.write_text("#!/bin/sh\necho No module named ensurepip\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(InstallError, match=r"(?s)put uv on PATH.* python3\.99-venv\).*No module named ensurepip"):
        pypi.install(folder, python)
