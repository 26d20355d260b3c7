"""The command line of `turngate run`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harnesses.conftest import TaskMaker
from turngate.harnesses.errors import LimitsUnenforced
from turngate.harnesses.reap import reap_command
from turngate.harnesses.run import read_settings, run_command, say_images, say_limits
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


@pytest.mark.parametrize(
    ("override", "lines"),
    [
        (
            "teacher=oracel",
            [
                "teacher: Input should be 'oracle' (got 'oracel')",
                "teacher: or a mapping with the keys url, model, api_key_env, params",
            ],
        ),
        (
            "teacher={url: http://x/v1, modle: y}",
            [
                "teacher.model: missing; set it in the file or as teacher.model=VALUE",
                "teacher.modle: unknown key, did you mean teacher.model?",
            ],
        ),
        ("sampling=5", ["sampling: Input should be a valid dictionary (got 5)"]),
    ],
)
def test_a_value_that_may_be_of_several_kinds_is_judged_as_the_one_it_looks_like(
    override: str, lines: list[str]
) -> None:
    with pytest.raises(ValueError, match=": ") as refused:
        read_settings(None, [override])
    assert str(refused.value).splitlines() == lines


def test_what_is_wrong_in_a_file_names_the_file(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("run:\n  concurency: 3\n  group_size: 0\n")
    with pytest.raises(ValueError, match=": ") as refused:
        read_settings(config, ["group_size=-1"])
    assert str(refused.value).splitlines() == [
        "group_size: Input should be greater than or equal to 1 (got -1)",
        f"{config}: concurency: unknown key, did you mean concurrency?",
    ]


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


def test_strict_limits_refuse_to_start_and_otherwise_what_is_not_held_is_printed_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lost = ["memory: held for each process", "disk: watched"]
    say_limits(RunSettings(), lost)
    assert capsys.readouterr().err.splitlines() == [f"turngate run: not enforced here: {line}" for line in lost]
    strict = RunSettings.model_validate({"limits": "strict"})
    assert strict.limits.strict
    with pytest.raises(LimitsUnenforced, match="memory: held for each process"):
        say_limits(strict, lost)
    say_limits(strict, [])


def test_a_run_with_strict_limits_that_cannot_be_held_ends_before_it_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ADMIN_KEY_ENV, "key")
    words = ["tasks=words", "limits=strict", "sandbox=process", f"scratch={tmp_path}", f"out={tmp_path / 'out'}"]
    assert run_command(words) == 1
    assert "isolation" in capsys.readouterr().err
    assert list(tmp_path.glob("turngate-run-*")) == []


def test_tasks_whose_dockerfile_is_not_built_are_named(
    capsys: pytest.CaptureFixture[str], make_task: TaskMaker
) -> None:
    tasks = [make_task("true"), make_task("true", environment={"Dockerfile": "FROM scratch"})]
    say_images(RunSettings(), tasks)
    said = capsys.readouterr().err
    assert "1 of 2 tasks" in said
    assert "sandbox=docker" in said
    say_images(RunSettings(sandbox="docker"), tasks)
    say_images(RunSettings(), tasks[:1])
    assert capsys.readouterr().err == ""


def test_reap_says_what_it_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--scratch", str(tmp_path), "--docker-host", f"unix://{tmp_path}/none", "--json"]
    assert reap_command(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["folders"], set(found)) == (0, {"folders", "cgroups", "containers"})
    assert reap_command(["--no-such"]) == 2


def test_a_gateway_without_a_scheme_and_an_empty_key_file_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gateway\n.*must begin with http://"):
        RunSettings(gateway="nonsense")
    (tmp_path / "key").touch()
    with pytest.raises(ValueError, match=r"admin_key_file: .* is empty"):
        RunSettings(admin_key_file=tmp_path / "key").admin_key()
