"""The launcher with fake parts: parts in order, reasons told, and no process left however it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from tests.trainer.launching import PATIENCE_S, Launch
from turngate.trainer import engine_process
from turngate.trainer.engine_process import EngineError
from turngate.trainer.launch_config import EngineConfig
from turngate.trainer.run_folder import RunFolder, RunFolderError
from turngate.trainer.summary import KEYS


def test_a_run_ends_with_the_summary_as_its_last_line(launch: Launch) -> None:
    status, out, err = launch.run("fake.yaml", "train.steps=4")
    assert status == 0, err
    summary = json.loads(out.splitlines()[-1])
    assert tuple(summary) == KEYS
    assert summary["steps"] == summary["groups_trained"] == summary["adapter_versions"] == 4
    assert (summary["reward_first"], summary["reward_last"]) == (0.1, 0.4)
    assert summary["exact_rows"] == summary["rows"] == 12
    assert f"turngate view {launch.run_folder}" in out
    assert f"curves: TRACKIO_DIR={launch.run_folder}/trackio " in out
    assert launch.processes() == []


def test_a_run_is_one_folder_with_the_resolved_configuration(launch: Launch) -> None:
    launch.run("fake.yaml", "train.steps=2")
    folder = launch.run_folder
    assert {path.name for path in folder.iterdir()} >= {
        "lock",
        "config.yaml",
        "run.json",
        "logs",
        "store",
        "metrics.jsonl",
    }
    assert {path.name for path in (folder / "logs").iterdir()} == {
        f"{name}.log" for name in ("engine", "gateway", "runner", "trainer")
    }
    assert yaml.safe_load((folder / "config.yaml").read_text())["train"]["steps"] == 2
    about = launch.about()
    assert about["state"] == "finished"
    assert about["parts"]["engine"]["port"] != about["parts"]["gateway"]["port"]


def test_with_another_tracker_the_trainer_stays_until_the_last_evaluation_is_there(launch: Launch) -> None:
    status, out, err = launch.run("fake.yaml", "eval.tasks=[held]", "train.report_to=[tensorboard]")
    assert status == 0, err
    assert (launch.run_folder / "logs" / "trainer.log").read_text() == "1 evaluations told\n"
    assert out.index("evaluating its last version") < out.index("evaluation step-3: nothing could be scored")
    assert launch.processes() == []


def test_with_trackio_alone_nothing_waits_for_the_last_evaluation(launch: Launch) -> None:
    status, _, err = launch.run("fake.yaml", "eval.tasks=[held]")
    assert status == 0, err
    assert (launch.run_folder / "logs" / "trainer.log").read_text() == ""
    assert (launch.run_folder / "evals.jsonl").exists()


def test_a_warm_start_runs_demonstrations_then_fine_tuning_then_training_from_its_adapter(launch: Launch) -> None:
    status, _, err = launch.run("fake.yaml", "warm_start.demonstrations.limit=8", "warm_start.sft.epochs=2")
    assert status == 0, err
    settings = {path.stem: yaml.safe_load(path.read_text()) for path in launch.run_folder.glob("*.yaml")}
    assert (settings["demonstrations"]["teacher"], settings["demonstrations"]["groups"]) == ("oracle", 8)
    assert settings["sft"]["store"] == str(launch.run_folder / "store")
    assert settings["trainer"]["adapter"] == str(launch.run_folder / "warm_start" / "adapter")
    assert list(launch.about()["parts"]) == ["engine", "gateway", "demonstrations", "sft", "trainer", "runner"]


def test_the_launcher_shows_what_fine_tuning_warned_of_at_once_and_when_the_run_ends(launch: Launch) -> None:
    status, out, err = launch.run("fake.yaml", "warm_start.store=elsewhere", FAKE_SFT="unlearnt")
    assert status == 0, err
    early, late = "ALARM untrained tokens: none can be taught", "ALARM fine-tuning: it will hardly ever call"
    assert out.index(early) < out.index(late) < out.index("sft done") < out.index("trainer started") < out.rindex(early)
    assert (out.count(early), out.count(late)) == (2, 2), "at once, and at the end"
    assert "8 rows of 4 tasks, 3 steps, loss 2.97 to 0.543, the hardest token '<tool_call>' ends at 9.13" in out
    assert json.loads(out.splitlines()[-1])["alarms"] == {"untrained tokens": 1, "fine-tuning": 1}
    told = [event["text"] for event in launch.events() if event["event"] == "alarm"]
    assert [f"ALARM {text}" for text in told] == [early, late]


def test_a_warm_start_that_fails_ends_the_run_before_any_training(launch: Launch) -> None:
    status, _, err = launch.run("fake.yaml", "warm_start.store=elsewhere", FAKE_SFT="die")
    assert status == 1
    assert "the sft broke its leg" in err
    assert "trainer" not in launch.about()["parts"]


@pytest.mark.parametrize("part", ["ENGINE", "PROXY", "RUN", "TRAIN"])
def test_a_part_that_dies_ends_the_run_with_its_last_words(launch: Launch, part: str) -> None:
    status, _, err = launch.run("fake.yaml", "restarts.pause_s=0", **{f"FAKE_{part}": "die", "FAKE_STEP_S": "100"})
    assert status == 1
    assert "ended with status 3" in err
    assert f"the {part.lower()} broke its leg" in err
    assert launch.about()["state"] == "failed"
    assert launch.processes() == []


def test_without_restarts_a_part_killed_ends_the_run_and_the_signal_is_named(launch: Launch) -> None:
    process = launch.start("fake.yaml", "restarts.limit=0", FAKE_STEP_S="100")
    launch.until(launch.all_parts_run)
    launch.kill("engine")
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "engine" in err
    assert "SIGKILL" in err
    assert launch.processes() == []


def test_a_sigkill_of_the_launcher_leaves_nothing_not_even_detached_grandchildren(launch: Launch) -> None:
    naughty = {f"FAKE_{part}": "children deaf" for part in ("ENGINE", "PROXY", "RUN", "TRAIN")}
    process = launch.start("fake.yaml", **naughty, FAKE_STEP_S="100")
    launch.until(launch.all_parts_run)
    launch.until(lambda: len(launch.processes()) >= 10)  # launcher, warden, 4 parts, 4 grandchildren
    process.kill()
    launch.until(lambda: launch.processes() == [])


def test_a_sigkill_of_the_warden_ends_the_run_and_every_part(launch: Launch) -> None:
    process = launch.start("fake.yaml", FAKE_STEP_S="100")
    launch.until(launch.all_parts_run)
    engine = launch.about()["parts"]["engine"]["pid"]
    parent = int(Path(f"/proc/{engine}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(parent, signal.SIGKILL)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "warden" in err
    launch.until(lambda: launch.processes() == [])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_stops_gracefully_with_status_130(launch: Launch, number: signal.Signals) -> None:
    process = launch.start("fake.yaml", FAKE_RUN="children", FAKE_STEP_S="100")
    launch.until(launch.all_parts_run)
    process.send_signal(number)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, err
    assert "stopping" in out
    assert "--resume" in err
    assert launch.about()["state"] == "interrupted"
    assert launch.processes() == []


def test_a_second_interrupt_ends_deaf_parts_at_once(launch: Launch) -> None:
    deaf = {f"FAKE_{part}": "children deaf" for part in ("ENGINE", "PROXY", "RUN", "TRAIN")}
    process = launch.start("fake.yaml", "stop_grace_s=1000", **deaf, FAKE_STEP_S="100")
    launch.until(launch.all_parts_run)
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    for line in process.stdout:
        if "stopping" in line:
            break
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert launch.processes() == []


def test_a_runner_that_is_done_early_is_no_failure_while_steps_are_made(launch: Launch) -> None:
    assert launch.run("fake.yaml", FAKE_RUN="done")[0] == 0


def test_a_trainer_that_waits_for_a_runner_that_is_done_ends_the_run(launch: Launch) -> None:
    status, _, err = launch.run("fake.yaml", "drain_s=1", FAKE_RUN="done", FAKE_STEP_S="100")
    assert status == 1
    assert "more groups" in err


def test_an_interrupted_run_goes_on_in_its_own_folder(launch: Launch) -> None:
    process = launch.start("fake.yaml", FAKE_STEP_S="100")
    launch.until(launch.all_parts_run)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE_S)
    run = launch.run_folder.name
    status, out, err = launch.run("--resume", run)
    assert status == 0, err
    assert "resumed" in out
    assert [path.name for path in (launch.folder / "runs").iterdir()] == [run]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name one configuration file"),
        (["none.yaml"], "cannot read none.yaml"),
        (["fake.yaml", "train.stepps=1"], "did you mean train.steps?"),
        (["fake.yaml", "engine.url=localhost:8000"], "not the base URL of a server, such as http://127.0.0.1:8000"),
        (["fake.yaml", "model=nosuch"], "no model 'nosuch': give a local folder"),
        (["--resume", "never"], "no run 'never'"),
        (["fake.yaml", "run.tasks=/nonexistent"], "/nonexistent: no such folder"),
        (["fake.yaml", "run.harness=nobody"], "harness 'nobody' is not known; choose one of"),
        (["fake.yaml", "run.harness_options.compaction=true"], "run.harness_options.compaction: pi's compaction"),
    ],
)
def test_wrong_usage_is_told_with_status_2(launch: Launch, words: list[str], said: str) -> None:
    status, _, err = launch.run(*words)
    assert status == 2
    assert said in err
    assert not (launch.folder / "runs").exists(), "nothing was started"


def test_check_prints_the_resolved_configuration_and_starts_nothing(launch: Launch) -> None:
    status, out, _ = launch.run("fake.yaml", "--check", "train.steps=8")
    assert status == 0
    assert yaml.safe_load(out)["train"]["steps"] == 8
    assert not (launch.folder / "runs").exists()


def test_two_launchers_never_share_a_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with pytest.raises(RunFolderError, match=f"in use by the launcher with pid {os.getpid()}"):
        RunFolder(tmp_path)
    folder.close()
    RunFolder(tmp_path).close()


def test_a_port_that_is_answered_already_is_refused_and_its_owner_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(EngineError, match=f"port {port} for the engine is already answered.*pid {os.getpid()}"):
            engine_process.own_port(port, "engine")


def test_an_engine_that_is_not_there_is_said_at_once_and_ends_the_run_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_process, "ABSENT_S", 0.5)
    said: list[str] = []
    with pytest.raises(EngineError, match=r"nothing answers at engine\.url=http://127.* start vLLM there first"):
        engine_process.await_running("http://127.0.0.1:1", 600.0, said.append, lambda waited_s: None)
    assert len(said) == 1
    assert "nothing answers at http://127.0.0.1:1 (" in said[0]


def test_an_engine_that_is_starting_is_waited_for() -> None:
    answers = iter([503, 503, 200])

    class Starting(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(next(answers))
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Quiet."""

    said: list[str] = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Starting) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        engine_process.await_running(url, 600.0, said.append, lambda waited_s: None)
        server.shutdown()
    assert said == [f"the engine at {url} is not ready yet (/health answers 503); waiting up to 600 s for it"]


def test_a_launch_in_front_of_nothing_starts_nothing(launch: Launch) -> None:
    status, out, err = launch.run("fake.yaml", "engine.url=http://127.0.0.1:1", "engine.start_timeout_s=0.1")
    assert status == 1
    assert "nothing answers at http://127.0.0.1:1" in out
    assert "engine.url=http://127.0.0.1:1 was not ready" in err
    assert launch.about()["state"] == "failed"
    assert launch.processes() == []


def test_the_engine_is_started_with_what_exactness_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(max_loras=3, max_lora_rank=8, tool_call_parser="hermes", extra_args=["--seed", "1"])
    argv = engine_process.engine_argv(config, Path("/models/m"), 8000, (0, 32))
    assert "--enable-scale-out" in argv
    assert argv[argv.index("--logprobs-mode") + 1] == "processed_logprobs"
    assert argv[argv.index("--max-loras") + 1] == "3"
    assert argv[-2:] == ["--seed", "1"]
    assert "--stream-interval" not in argv  # each request says its own
    older = engine_process.engine_argv(config, "owner/m", 8000, (0, 26))
    assert "--enable-scale-out" not in older
    assert int(older[older.index("--stream-interval") + 1]) > 1
    env = engine_process.engine_env(config, Path("/models/m"), "vllm-cpu")
    assert env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert "OMP_NUM_THREADS" not in env
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    on_gpu = engine_process.engine_env(config, "owner/m", "vllm")
    assert "VLLM_CPU_KVCACHE_SPACE" not in on_gpu
    assert on_gpu["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert "OMP_NUM_THREADS" not in engine_process.engine_env(config, "owner/m", "vllm")
