"""Every setting is documented, unknown ones are refused, and flags win over the file."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from turngate.harnesses.settings import RunSettings
from turngate.proxy.client import GatewayClient
from turngate.trainer.errors import SettingsError
from turngate.trainer.settings import ADMIN_KEY_VARIABLE, TrainSettings
from turngate.trainer.train import _unless_stopped, load_settings, train_command


def test_every_setting_says_what_it_means() -> None:
    assert [name for name, field in TrainSettings.model_fields.items() if not field.description] == []


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert train_command(["--help"]) == 0
    text = capsys.readouterr().out
    for name in TrainSettings.model_fields:
        assert f"--{name.replace('_', '-')}" in text


def test_settings_survive_being_written_down(tmp_path: Path) -> None:
    made = TrainSettings(model="m", output=tmp_path, lora_targets=("q_proj",))
    assert TrainSettings.model_validate_json(made.model_dump_json()) == made


def test_the_file_has_a_train_section_and_flags_win(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("run: {x: 1}\ntrain: {model: m, steps: 3, lora_targets: [q_proj]}\n")
    made = load_settings(file, {"steps": "5"})
    assert (made.model, made.steps, made.lora_targets) == ("m", 5, ("q_proj",))


@pytest.mark.parametrize(
    ("text", "word"),
    [("train: {model: m, step: 3}", "step"), ("train: {model: m, is_cap: 1.1}", "is_cap"), ("[]", "mapping")],
)
def test_a_wrong_file_says_which_key(tmp_path: Path, text: str, word: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=word):
        load_settings(file, {})


def test_a_missing_key_is_a_usage_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv(ADMIN_KEY_VARIABLE, raising=False)
    assert train_command(["--model", "m"]) == 2
    assert ADMIN_KEY_VARIABLE in capsys.readouterr().err


@pytest.mark.parametrize("name", ["gateway", "engine_url"])
def test_what_is_no_url_is_said_at_once(name: str) -> None:
    with pytest.raises(SettingsError, match=rf"^{name}: must begin with http://"):
        load_settings(None, {"model": "m", name: "notaurl"})


def test_a_key_file_that_is_no_text_is_told_in_words(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match="holds no key: it is no text"):
        TrainSettings(model="m", admin_key_file=tmp_path / "key").admin_key()
    with pytest.raises(ValueError, match="holds no key: it is no text"):
        RunSettings(admin_key_file=tmp_path / "key").admin_key()


def test_a_stop_before_the_gateway_was_there_ends_the_waiting() -> None:
    stop = threading.Event()
    with GatewayClient("http://127.0.0.1:1", "key") as client:
        assert _unless_stopped(stop, client) is client
        stop.set()
        with pytest.raises(KeyboardInterrupt):
            _unless_stopped(stop, client)


def test_the_key_is_read_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\n")
    assert TrainSettings(model="m", admin_key_file=tmp_path / "key").admin_key() == "secret"
