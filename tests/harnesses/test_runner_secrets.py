"""The runner, its sandboxes and what they write down: a session's secret is the agent's alone."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.fake_engine.settings import FakeSettings
from tests.gateway_process import GatewayProcess
from tests.harnesses.conftest import TaskMaker
from tests.harnesses.doubles import ScriptHarness
from tests.harnesses.test_chat import write_function, write_rows
from tests.secrecy import CommandLines, files_with
from turngate.harnesses.base import Endpoint, HarnessOptions, Places
from turngate.harnesses.bubblewrap import Bubblewrap
from turngate.harnesses.install import Installed
from turngate.harnesses.patient import PatientGateway
from turngate.harnesses.process import PlainProcess
from turngate.harnesses.rollout import Result, Stage, run_rollout
from turngate.harnesses.sandbox import Sandbox
from turngate.harnesses.settings import RunSettings
from turngate.harnesses.workspace import Scratch
from turngate.proxy import wire
from turngate.proxy.client import GatewayClient

TURN = """
import json, os, sys, urllib.request
body = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode()
key = os.environ["AGENT_KEY"]
head = {"content-type": "application/json", "authorization": f"Bearer {key}"}
print(urllib.request.urlopen(urllib.request.Request(os.environ["AGENT_URL"], body, head)).read().decode())
print(f"my key is {key}, my URL {os.environ['AGENT_URL']}", file=sys.stderr)
sys.exit(7)
"""


class Chatty(ScriptHarness):
    """An agent that takes a turn, prints its key and fails; key and URL are in its environment, as most have them."""

    def command(self, places: Places, endpoint: Endpoint, prompts: object, options: HarnessOptions) -> list[str]:
        """The script."""
        return ["python3", "-c", self.script]

    def env(self, places: Places, endpoint: Endpoint) -> dict[str, str]:
        """The key."""
        return {"AGENT_KEY": endpoint.api_key, "AGENT_URL": f"{endpoint.base_url}/chat/completions"}


class Noting(PatientGateway):
    """Keeps the secrets that it is given."""

    def __init__(self, client: GatewayClient) -> None:
        super().__init__(client, 10)
        self.secrets: list[str] = []

    async def create(self, new: wire.NewRollout) -> wire.RolloutCreated:
        """See `PatientGateway`."""
        created = await super().create(new)
        self.secrets.append(created.api_key)
        return created


def play(
    gateway: GatewayProcess, sandbox: Sandbox, task: object, folder: Path
) -> tuple[Result, list[str], CommandLines]:
    """One rollout of the chatty agent, watched."""
    nothing = folder / "nothing-installed"
    nothing.mkdir(parents=True)
    settings = RunSettings(gateway=gateway.url)
    patient = Noting(gateway.client)
    with Scratch(folder / "scratch") as scratch, CommandLines() as watch:
        stage = Stage(
            *(settings, Chatty(TURN), Installed(nothing, nothing), sandbox),  # type: ignore[arg-type]
            *(patient, scratch, folder / "faults"),
        )
        result = asyncio.run(run_rollout(stage, task, sandbox.name))  # type: ignore[arg-type]
    return result, patient.secrets, watch


def test_an_agents_key_is_in_no_argument_and_in_nothing_kept_of_what_it_printed(
    serve: Callable[..., GatewayProcess], make_task: TaskMaker, tmp_path: Path
) -> None:
    gateway = serve(["A slow answer."], settings=FakeSettings(tokens_per_s=10.0))
    for sandbox in (Bubblewrap(), PlainProcess()):
        folder = tmp_path / sandbox.name
        result, secrets, watch = play(gateway, sandbox, make_task("true"), folder)
        assert (result.cause, result.turns) == ("harness_exit_7", 1), result
        assert len(secrets) == 1
        assert watch.has("AGENT_KEY", "launcher.py"), "the agent's own process was not seen"
        assert sandbox.name != "bubblewrap" or watch.has("bwrap", "--args")
        admin = (gateway.store / "admin.key").read_text().strip()
        assert not any(watch.has(secret) for secret in (*secrets, admin))
        assert "my key is" in result.detail
        assert secrets[0] not in json.dumps(result.as_json())
        assert len(list((folder / "faults").iterdir())) == 1
        assert files_with([*secrets, admin], folder) == []


def test_a_runner_as_users_start_it_shows_no_key(serve: Callable[..., GatewayProcess], tmp_path: Path) -> None:
    gateway = serve(["It is 4."], settings=FakeSettings(tokens_per_s=10.0))
    rows = write_rows(tmp_path / "rows", [{"prompt": "2+2?"}])
    judge = write_function(tmp_path, "return [1.0 for _ in completions]")
    words = [f"tasks={rows}", f"gateway={gateway.url}", f"admin_key_file={gateway.store / 'admin.key'}"]
    words += ["harness=chat", "epochs=1", "group_size=2", f"dataset.rewards=[{judge}]", f"out={tmp_path / 'out'}"]
    with CommandLines() as watch:
        done = subprocess.run(
            [sys.executable, "-m", "turngate.proxy.cli", "run", *words, "--json"], capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr[-2000:]
    admin = (gateway.store / "admin.key").read_text().strip()
    assert watch.has("turngate.proxy.cli", "harness=chat")
    assert not watch.has(admin)
    assert not watch.has("tg-admin-")
    said = done.stdout + done.stderr + gateway.log.read_text()
    assert admin not in said
    assert "/s/tg-" not in said
    assert files_with([admin, "/s/tg-"], tmp_path) == [gateway.store / "admin.key"]
    assert list((tmp_path / "out").iterdir())
