"""The command line of `turngate run`."""

from __future__ import annotations

from pathlib import Path

import pytest

from turngate.harnesses.run import read_settings, run_command
from turngate.harnesses.settings import ADMIN_KEY_ENV, RunSettings


def test_settings_come_from_the_run_section_and_overrides_win(tmp_path: Path) -> None:
    file = tmp_path / "launch.yaml"
    file.write_text("model: m\nrun:\n  concurrency: 3\n  sampling: {temperature: 1.0}\n")
    settings = read_settings(file, ["concurrency=5", "sampling.top_p=0.9", "harness_options.tools=false"])
    assert (settings.concurrency, settings.sampling) == (5, {"temperature": 1.0, "top_p": 0.9})
    assert settings.harness_options.tools is False


def test_settings_may_stand_at_the_top_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "runner.yaml"
    file.write_text("groups: 2\n")
    assert read_settings(file, []).groups == 2


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("concurency=1", "concurency"),
        ("concurrency=0", "concurrency"),
        ("concurrency", "key=value"),
        ("harness_options.tool=1", "harness_options.tool"),
        ("sandbox=none", "sandbox"),
    ],
)
def test_a_wrong_setting_is_wrong_usage_and_named(
    override: str, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ADMIN_KEY_ENV, "key")
    assert run_command([override]) == 2
    assert words in capsys.readouterr().err


def test_every_wrong_setting_is_told_with_the_one_that_was_meant(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ADMIN_KEY_ENV, "key")
    assert run_command(["concurency=1", "harness_options.tool=1", "memory_bytes=5", "group_size=none"]) == 2
    said = capsys.readouterr().err
    assert "concurency: unknown key, did you mean concurrency?" in said
    assert "harness_options.tool: unknown key, did you mean harness_options.tools?" in said
    assert "memory_bytes: unknown key, did you mean limits.memory_bytes?" in said
    assert "group_size: Input should be a valid integer" in said


def test_a_missing_key_is_wrong_usage(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ADMIN_KEY_ENV, raising=False)
    assert run_command([]) == 2
    assert ADMIN_KEY_ENV in capsys.readouterr().err


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name}: {field.description}" in shown for name, field in RunSettings.model_fields.items())


def test_the_agents_are_listed_with_their_versions(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["--list"]) == 0
    assert "@earendil-works/pi-coding-agent" in capsys.readouterr().out


def test_a_task_folder_that_is_wrong_fails_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ADMIN_KEY_ENV, "key")
    assert run_command([f"tasks={tmp_path}"]) == 1
    assert "no task.toml" in capsys.readouterr().err


def test_every_field_is_described() -> None:
    assert all(field.description for field in RunSettings.model_fields.values())
