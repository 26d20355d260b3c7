"""The `turngate` command: its help, its exit statuses, and what it says when an extra is not installed."""

from __future__ import annotations

import ast
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from turngate.proxy import cli

BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocked())
from turngate.proxy.cli import main
sys.exit(main({argv!r}))
"""

ROOT = Path(__file__).parents[1]
HEAVY = ["torch", "trl", "transformers", "peft", "accelerate", "datasets", "psutil", "pyarrow", "vllm"]


def turngate(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "turngate.proxy.cli", *argv], capture_output=True, text=True)


def without(blocked: list[str], *argv: str) -> subprocess.CompletedProcess[str]:
    code = BLOCKED.format(blocked=blocked, argv=list(argv))
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_help_lists_every_command_and_succeeds() -> None:
    done = turngate("--help")
    assert done.returncode == 0
    for name, command in cli.COMMANDS.items():
        assert name in done.stdout
        assert command.summary[:20] in done.stdout


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_each_command_explains_itself(name: str) -> None:
    done = turngate(name, "--help")
    assert done.returncode == 0, done.stderr
    assert f"turngate {name}" in done.stdout
    assert len(done.stdout.splitlines()) >= 8, "a help worth reading"


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_an_option_cut_short_is_wrong_usage_and_the_whole_of_it_is_named(name: str) -> None:
    done = turngate(name, "--hel")
    assert done.returncode == 2, "argparse would have taken it for --help"
    assert "no --hel, did you mean --help" in done.stderr


def test_no_parser_of_the_repository_takes_an_option_cut_short() -> None:
    calls = [
        (file, node)
        for folder in ("proxy", "trainer", "harnesses", "tasks", "bench", "docs", "examples", "tests")
        for file in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("ArgumentParser")
    ]
    assert calls, "there are some in bench/"
    wrong = [str(file) for file, node in calls if "allow_abbrev=False" not in map(ast.unparse, node.keywords)]
    assert wrong == [], "use turngate.proxy.arguments.Parser, or say allow_abbrev=False"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["train", "--lr", "3"], "no --lr, did you mean --lora-r or --learning-rate or --lr-schedule?"),
        (["train", "--learning_rate=3"], "no --learning_rate, did you mean --learning-rate?"),
        (["proxy", "--engin", "x"], "no --engin, did you mean --engine or"),
        (["harnesses", "install", "pi", "--jsno"], "no --jsno, did you mean --json?"),
    ],
)
def test_the_option_that_was_meant_is_named(given: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(given) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", ["tasks stats", "tasks check", "tasks oracle", "sft --model smollm2-135m --out out", "harnesses install"]
)
def test_what_is_not_there_is_wrong_usage(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main([*words.split(), "nosuch"]) == 2
    assert "nosuch" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["tasks=nosuch", "harness=nosuch"])
def test_a_run_of_what_is_not_there_is_wrong_usage(
    wrong: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TURNGATE_ADMIN_KEY", "key")
    assert cli.main(["run", wrong]) == 2
    assert "nosuch" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        "run tasks=words sandbox=process out=file/x",
        "run tasks=words sandbox=process scratch=file/x",
        "train --model m --output file/x",
        "sft store --model m --out file/x",
        "launch run.yaml out=file/x",
    ],
)
def test_a_folder_that_cannot_be_written_is_wrong_usage_told_before_anything_starts(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TURNGATE_ADMIN_KEY", "key")
    Path("file").write_text("")
    Path("run.yaml").write_text("{model: a/b, run: {}, train: {}}")
    assert cli.main(words.split()) == 2
    said = capsys.readouterr().err
    assert "file/x" in said
    assert "Not a directory" in said
    assert "Errno" not in said


def test_a_store_that_cannot_be_made_is_told_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = turngate("proxy", "--engine", "http://127.0.0.1:1", "--store", str(tmp_path / "file" / "store"))
    assert done.returncode == 1
    assert f"no store can be made at {tmp_path}/file/store: Not a directory; name a folder" in done.stderr
    assert "Errno" not in done.stderr


def test_no_command_is_wrong_usage_and_still_shows_the_help() -> None:
    done = turngate()
    assert done.returncode == 2
    assert "usage" in done.stderr


def test_a_misspelt_command_is_wrong_usage_and_names_the_right_one() -> None:
    done = turngate("lunch")
    assert done.returncode == 2
    assert "launch" in done.stderr


def test_a_part_of_a_command_names_the_whole_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["install", "pi"]) == 2
    assert "did you mean `turngate harnesses install`?" in capsys.readouterr().err


def test_version_is_printed() -> None:
    assert turngate("--version").stdout.startswith("turngate 0.")


def test_help_and_the_gateway_need_none_of_the_heavy_packages() -> None:
    for argv in (["--help"], ["proxy", "--help"], ["verify", "--help"], ["view", "--help"]):
        done = without(HEAVY, *argv)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("argv", [("train", "--model", "none"), ("launch", "--help")])
def test_a_missing_package_names_its_extra(argv: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNGATE_ADMIN_KEY", "key")
    done = without(HEAVY, *argv)
    assert done.returncode == 1
    assert "pip install 'turngate[train]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_interrupt_gives_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "resolve", lambda command: interrupted)
    assert cli.main(["proxy"]) == 130


def test_a_failed_command_gives_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "resolve", lambda command: lambda argv: 1)
    assert cli.main(["verify", "store"]) == 1


def test_a_gateway_without_its_engine_fails_and_says_so_in_its_last_line(tmp_path: Path) -> None:
    options = ("--store", str(tmp_path), "--engine-wait-s", "0.1", "--port", "0")
    done = turngate("proxy", "--engine", "http://127.0.0.1:1", *options)
    assert done.returncode == 1
    assert "http://127.0.0.1:1 was not ready" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_gateway_that_waits_for_its_engine_can_be_stopped(number: int, status: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "turngate.proxy.cli", "proxy", "--engine", "http://127.0.0.1:1"]
    with subprocess.Popen([*command, "--store", str(tmp_path), "--port", "0"], stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert b"waiting for" in process.stderr.readline()
        while not (tmp_path / "admin.key").exists():
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(timeout=60) == status


@pytest.mark.parametrize("url", ["localhost:8000", "http://127.0.0.1:8000/v1"])
def test_what_is_no_base_url_is_wrong_usage(url: str, tmp_path: Path) -> None:
    done = turngate("proxy", "--engine", url, "--store", str(tmp_path))
    assert done.returncode == 2
    assert "--engine" in done.stderr
    assert "such as http://127.0.0.1:8000" in done.stderr
