"""`turngate doctor` finds what is wrong before a run does, and says what to do about each."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engines import RealEngine
from tests.fake_engine.runner import FakeEngine
from tests.fake_engine.settings import FakeSettings
from tests.gateway_process import GatewayProcess
from tests.proxy.store.samples import make_store
from turngate.harnesses import doctor_checks as harness_checks
from turngate.proxy import doctor, doctor_checks, doctor_engine
from turngate.proxy.doctor import doctor_command
from turngate.proxy.engine.types import Capabilities
from turngate.proxy.store.control import ControlStore
from turngate.trainer import doctor_checks as trainer_checks

GOOD = Capabilities("m", 4096, "0.32.0", True, "processed", 8, True, 4, True)
Lines = list[tuple[str, str, str, str]]


def found(lines: Iterator[doctor.Line] | Lines, what: str) -> doctor.Line:
    return next(line for line in lines if line[1] == what)


@pytest.fixture
def fake(model_dir: Callable[[str], Path]) -> Iterator[FakeEngine]:
    with FakeEngine(model_dir("qwen-coder-0.5b"), ["Hello."]) as made:
        yield made


def run(*argv: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    status = doctor_command([*argv, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_a_good_engine_and_a_free_port_leave_no_failure(
    fake: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("--engine", fake.url, "--store", str(tmp_path / "store"), "--port", "0")
    _, report = run(*argv, capsys=capsys)
    of_gateway = [one for one in report["checks"] if one["check"] not in ("sandbox", "node")]
    assert not [one for one in of_gateway if one["status"] == "fail"]
    assert {"engine", "exact tokens", "log-probs", "adapters", "disk space", "store writes", "port", "sandbox"} <= {
        one["check"] for one in report["checks"]
    }
    assert not list(tmp_path.iterdir())


def test_every_warning_and_failure_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    _, report = run("--engine", "http://127.0.0.1:9", "--port", "0", capsys=capsys)
    assert all(one["todo"] for one in report["checks"] if one["status"] != "ok")


def test_an_engine_that_is_away_and_a_port_that_is_taken_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = str(taken.getsockname()[1])
        status, report = run(
            *("--engine", "http://127.0.0.1:9", "--store", str(tmp_path), "--port", number), capsys=capsys
        )
    failed = {one["check"] for one in report["checks"] if one["status"] == "fail"}
    assert (status, report["ok"]) == (1, False)
    assert {"engine", "port"} <= failed


def test_a_port_where_a_gateway_runs_already_is_told_as_such(fake: FakeEngine, tmp_path: Path) -> None:
    with GatewayProcess(fake.url, tmp_path / "store") as gateway:
        line = next(doctor_checks.port("127.0.0.1", gateway.port))
        assert (line[0], line[2]) == ("warn", f"a gateway is running on 127.0.0.1:{gateway.port}")
        assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700
        assert next(doctor_checks.port("127.0.0.1", fake.port))[0] == "fail"


@pytest.mark.parametrize(
    ("changed", "what", "status", "todo"),
    [
        ({"exact": False}, "exact tokens", "fail", "--enable-scale-out"),
        ({"logprobs_mode": "raw"}, "log-probs", "fail", "processed_logprobs"),
        ({"logprobs_mode": "unknown"}, "log-probs", "warn", "processed_logprobs"),
        ({"has_parser": False}, "tool parser", "warn", "--tool-call-parser"),
        ({"runtime_lora": False}, "adapters", "warn", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
        ({"max_loras": 1}, "adapters", "warn", "--max-loras"),
    ],
)
def test_what_an_engine_lacks_is_told_with_the_option_that_cures_it(
    changed: dict[str, Any], what: str, status: str, todo: str
) -> None:
    line = found(doctor_engine.describe("http://e", replace(GOOD, **changed)), what)
    assert line[0] == status
    assert todo in line[3]


def test_a_good_engine_has_only_good_lines() -> None:
    assert {line[0] for line in doctor_engine.describe("http://e", GOOD)} == {"ok"}


def test_an_old_engines_streaming_is_named(model_dir: Callable[[str], Path]) -> None:
    with FakeEngine(model_dir("qwen-coder-0.5b"), ["Hello."], settings=FakeSettings(old_wire=True)) as old:
        lines = list(doctor_engine.checks({"engines": [old.url], "render": None, "adapter": None}))
    assert found(lines, "exact tokens")[0] == "ok"
    assert "0.26" in found(lines, "streaming")[2]


def test_an_adapter_is_loaded_for_real_and_unloaded_again(fake: FakeEngine, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    lines = list(doctor_engine.checks({"engines": [fake.url], "render": None, "adapter": tmp_path}))
    assert found(lines, "adapter")[0] == "ok"
    assert fake.seen("/v1/unload_lora_adapter")


@pytest.mark.engine
def test_the_real_engine_has_what_training_needs(smollm_engine: RealEngine) -> None:
    lines = list(doctor_engine.checks({"engines": [smollm_engine.url], "render": None, "adapter": None}))
    assert {line[1]: line[0] for line in lines} == {
        "engine": "ok",
        "exact tokens": "ok",
        "log-probs": "ok",
        "tool parser": "warn",
        "adapters": "ok",
    }


def test_a_folder_that_cannot_be_written_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor_checks.tempfile, "mkdtemp", refuse)
    assert found(doctor_checks.disk(tmp_path / "store"), "store writes")[0] == "fail"


@pytest.mark.parametrize(("kind", "status"), [("nfs4", "fail"), ("overlay", "warn"), ("ext4", "ok")])
def test_a_file_system_that_cannot_hold_a_store_is_told(
    kind: str, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_checks, "file_system", lambda folder: kind)
    assert found(doctor_checks.disk(tmp_path), "file system")[0] == status


def test_a_store_that_a_gateway_owns_and_one_that_is_damaged_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = make_store(tmp_path / "store").folder
    options = {"store": store.path, "host": "127.0.0.1", "port": 0}
    assert "2 rollouts finished" in found(doctor_checks.checks(options), "store")[2]
    store.path.chmod(0o755)
    assert found(doctor_checks.checks(options), "store")[3].startswith(f"chmod 700 {store.path}")
    store.path.chmod(0o700)
    with ControlStore(store.control):
        assert "a gateway is running" in found(doctor_checks.checks(options), "store")[2]
    store.control.write_bytes(b"no database" * 1000)
    assert found(doctor_checks.checks(options), "store")[0] == "fail"


def test_a_sandbox_that_does_not_work_fails_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    line = found(harness_checks.checks({}), "sandbox")
    assert line[0] == "fail"
    assert "install the system package bubblewrap" in line[2]


def test_a_kernel_that_forbids_user_namespaces_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "user/max_user_namespaces"
    now = (Path("/proc/sys") / name).read_text().strip()
    monkeypatch.setattr(harness_checks, "SYSCTLS", {name: (now, "cure")})
    line = found(harness_checks.checks({}), "namespaces")
    assert (line[0], line[3]) == ("warn", "cure")


def test_a_harness_that_is_not_installed_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNGATE_CACHE", str(tmp_path))
    lines = [line for line in harness_checks.checks({}) if line[1] == "harnesses"]
    assert [line[0] for line in lines] == ["ok", "warn"], "one line for all of them"
    assert "chat" in lines[0][2]
    assert "pi" in lines[1][2]
    assert "turngate harnesses install pi opencode " in lines[1][3]
    assert not list(tmp_path.iterdir())


def test_gpus_are_named_where_the_driver_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'A GPU, 80000 MiB, 570.1'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert found(trainer_checks.checks({}), "GPU")[:3] == ("ok", "GPU", "A GPU, 80000 MiB, 570.1")


def test_a_package_that_is_missing_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CHECKS", (("no_such_package.checks", "train"),))
    assert next(iter(doctor.diagnose({})))[3].startswith("pip install 'turngate[train]'")


def test_the_doctor_imports_no_training_package() -> None:
    program = "import sys, turngate.proxy.cli as c; c.main(['doctor', '--port', '0']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
