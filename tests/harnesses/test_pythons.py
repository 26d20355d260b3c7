"""Which Python an agent runs on: the runner's own where it may, another of the machine only when it says what it is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from turngate.harnesses.errors import InstallError
from turngate.harnesses.pythons import base_python, find_python

MINE = (sys.version_info[0], sys.version_info[1])
OTHER = (3, 99)


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder that is all of PATH; pyenv and uv have nothing."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, value in (("PATH", folder), ("PYENV_ROOT", tmp_path / "no"), ("UV_PYTHON_INSTALL_DIR", tmp_path / "no")):
        monkeypatch.setenv(name, str(value))
    return folder


def put(folder: Path, prints: str, status: int = 0) -> None:
    """A program called python3.99 that prints something."""
    file = folder / "python3.99"
    file.write_text(f"#!/bin/sh\nprintf '{prints}'\nexit {status}\n")
    file.chmod(0o755)


def test_the_runners_own_python_is_taken_where_its_version_is_right(path: Path) -> None:
    assert find_python(MINE, "an agent") == base_python()
    assert base_python().is_file()


def test_one_in_a_virtual_environment_is_told_by_the_installation_behind_it(path: Path, tmp_path: Path) -> None:
    real = tmp_path / "real" / "bin"
    real.mkdir(parents=True)
    put(real, "")
    put(path, rf"{real.parent}\n3\n99\n")
    assert find_python(OTHER, "an agent") == real / "python3.99"


@pytest.mark.parametrize(("prints", "status"), [("", 127), (r"/nowhere\n3\n99\n", 0), (r"/usr\n3\n10\n", 0), ("no", 0)])
def test_a_shim_with_nothing_behind_it_or_another_version_is_none(path: Path, prints: str, status: int) -> None:
    put(path, prints, status)
    with pytest.raises(InstallError, match=r"an agent runs on Python 3\.99 only .* put python3\.99 on PATH"):
        find_python(OTHER, "an agent")
