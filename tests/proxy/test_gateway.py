"""What the gateway decides as it opens."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from turngate.proxy.keys import admin_key
from turngate.proxy.policies import live_versions
from turngate.proxy.store.errors import Invalid


@pytest.mark.parametrize(("places", "kept"), [(None, None), (1, 1), (2, 1), (4, 3), (8, 7)])
def test_one_adapter_place_stays_empty_where_there_are_several(places: int | None, kept: int | None) -> None:
    assert live_versions(places) == kept


def test_no_more_versions_are_kept_than_the_engine_has_places() -> None:
    assert [live_versions(places, 4) for places in (None, 4, 8)] == [4, 4, 4]
    with pytest.raises(Invalid, match="--max-loras 4 or more"):
        live_versions(3, 4)


def test_the_administration_key_is_made_once_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "store" / "admin.key"
    key = admin_key(path)
    assert admin_key(path) == key
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("left", ["", "\n", "tg-admin-"])
def test_a_key_that_would_keep_nobody_out_is_refused_and_never_written(
    left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "admin.key"
    path.touch(mode=0o600)
    path.write_text(left)
    with pytest.raises(PermissionError, match="delete the file for a new key"):
        admin_key(path)
    path.unlink()
    (tmp_path / f"admin.key.{os.getpid()}").write_text("of one that was killed")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            admin_key(path)
    assert list(tmp_path.iterdir()) == []
    assert len(admin_key(path)) > 40


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "admin.key"
    admin_key(path)
    path.chmod(0o644)
    with pytest.raises(PermissionError, match="chmod 600"):
        admin_key(path)
