"""Secrets stay where they belong: over a real run they are in no log, store file, export, error or argument.

A session's secret is known to its agent alone, the administration key to its file. What an agent writes into its own
messages is recorded as it is, also its own secret; nothing here sends it there.
"""

from __future__ import annotations

import json
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.fake_engine.runner import FakeEngine
from tests.fake_engine.settings import Fault
from tests.gateway_process import GatewayProcess
from tests.secrecy import CommandLines, children, environment, files_with
from turngate.proxy import wire
from turngate.proxy.store.export import export_command

BODY = {"messages": [{"role": "user", "content": "Hi"}]}
MODES = {"one process": (), "workers behind the main port": ("--workers", "2", "--front", "true")}


@dataclass
class Told:
    """A gateway that was used in every way, and all that it said to agents and other callers."""

    gateway: GatewayProcess
    fake: FakeEngine
    watch: CommandLines
    secrets: list[str] = field(default_factory=list)
    answers: list[bytes] = field(default_factory=list)
    statuses: set[int] = field(default_factory=set)

    @property
    def admin(self) -> str:
        """The administration key."""
        return (self.gateway.store / "admin.key").read_text().strip()

    def new(self, **new: object) -> wire.RolloutCreated:
        """A session whose secret is to be found nowhere."""
        created, _ = self.gateway.session(**new)
        self.secrets.append(created.api_key)
        return created

    def ask(self, method: str, url: str, **options: object) -> None:
        """Send a request and keep its whole answer, headers too."""
        answer = httpx.request(method, url, timeout=60, **options)  # type: ignore[arg-type]
        self.statuses.add(answer.status_code)
        self.answers.append(repr(answer.headers.raw).encode() + answer.content)

    def shout(self, raw: bytes) -> None:
        """Send bytes that are no sound request."""
        with socket.create_connection(("127.0.0.1", self.gateway.port)) as client:
            client.settimeout(30)
            client.sendall(raw)
            self.answers.append(b"".join(iter(lambda: client.recv(65536), b"")))


def use(told: Told) -> None:
    """Turns streamed and whole, refused, failed, closed; keys in every place; requests that are nonsense."""
    url = told.gateway.url
    one = told.new(group="g", group_size=2)
    for body in (BODY, {**BODY, "stream": True}, {**BODY, "n": 2}, {"messages": 5}):
        told.ask("POST", f"{one.base_url}/chat/completions", json=body)
    bearer, plain = {"authorization": f"Bearer {one.api_key}"}, {"x-api-key": one.api_key}
    for headers in (bearer, plain):
        told.ask("POST", f"{url}/v1/chat/completions", json=BODY, headers=headers)
        told.ask("GET", f"{url}/v1/models", headers=headers)
        told.ask("GET", f"{url}/rollouts", headers=headers)
    for path in ("/nothing", "/chat", "/models", "/v1/chat/completions/x", "/../../rollouts"):
        told.ask("POST", f"{url}/s/{one.api_key}{path}", json=BODY)
    told.ask("GET", f"{url}/v1/models?secret={one.api_key}&key={one.api_key}")
    told.ask("POST", f"{url}/{one.api_key}", json=BODY)
    told.ask("POST", f"{url}/s/{one.api_key[:-1]}x/v1/chat/completions", json=BODY)
    told.ask("POST", f"{one.base_url}/chat/completions", json=BODY, headers={"host": f"{one.api_key}.example"})
    for raw in (f"GET /s/{one.api_key}/v1 HTTP/9.9\r\n\r\n", f"{one.api_key} / HTTP/1.1\r\n\r\n"):
        told.shout(raw.encode())
    told.shout(f"GET /{'x' * 100_000}{one.api_key} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
    failed = told.new(group="g", group_size=2)
    for kind in ("error", "refuse"):
        told.fake.fail(Fault(kind, times=-1))
        for stream in (False, True):
            told.ask("POST", f"{failed.base_url}/chat/completions", json={**BODY, "stream": stream})
    told.fake.fail(None)
    told.ask("POST", f"{failed.base_url}/chat/completions", json=BODY)
    for created in (one, failed):
        told.gateway.client.finish_rollout(created.id, wire.FinishRollout(reward=1.0, metrics={"a": 1}))
        told.ask("POST", f"{created.base_url}/chat/completions", json=BODY)
    told.new()
    key = {"authorization": f"Bearer {told.admin}"}
    told.ask("POST", f"{url}/leases", json={"policy": "policy"}, headers=key)
    told.ask("POST", f"{url}/rollouts", content=b"{", headers=key)
    for path in ("/rollouts", "/status", f"/rollouts/{one.id}", "/rollouts/none", "/adapters", "/policies/policy"):
        told.ask("GET", f"{url}{path}", headers=key)
    told.ask("GET", f"{url}/rollouts", headers={"authorization": f"Basic {told.admin}"})
    for path in ("/metrics", "/openapi.json", "/readyz", "/healthz"):
        told.ask("GET", url + path)


@pytest.fixture(scope="module", params=MODES, ids=str)
def told(
    request: pytest.FixtureRequest, model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Told]:
    """A gateway of one process, and one of three, after `use`."""
    with ExitStack() as stack:
        fake = stack.enter_context(FakeEngine(model_dir("qwen-coder-0.5b"), ["Hello."]))
        watch = stack.enter_context(CommandLines())
        store = tmp_path_factory.mktemp("secrets") / "store"
        gateway = stack.enter_context(GatewayProcess(fake.url, store, *MODES[request.param]))
        made = Told(gateway, fake, watch)
        use(made)
        yield made


def test_every_kind_of_answer_was_seen_and_none_has_a_secret(told: Told) -> None:
    assert {200, 400, 401, 404, 410, 421, 503} <= told.statuses
    for answer in told.answers:
        assert told.admin.encode() not in answer
        assert not any(secret.encode() in answer for secret in told.secrets), answer[:500]


def test_the_log_is_loud_and_has_none(told: Told) -> None:
    log = told.gateway.log.read_text()
    assert '"level":"debug"' in log
    assert not [line for line in log.splitlines() if any(one in line for one in (*told.secrets, told.admin))]


def test_no_byte_of_a_store_file_has_one_also_while_it_is_written(told: Told) -> None:
    names = {file.name for file in told.gateway.store.iterdir()}
    assert {"control.sqlite", "control.sqlite-wal", "turns-0.sqlite-wal"} <= names
    assert files_with(told.secrets, told.gateway.store) == []
    assert files_with([told.admin], told.gateway.store) == [told.gateway.store / "admin.key"]


@pytest.mark.parametrize("what", ["rows", "turns", "rollouts"])
def test_no_export_has_one(told: Told, tmp_path: Path, what: str) -> None:
    for name in ("out.jsonl", "out.parquet"):
        assert export_command([str(told.gateway.store), "--what", what, "--out", str(tmp_path / name)]) == 0
    assert (tmp_path / "out.jsonl").stat().st_size
    assert files_with([*told.secrets, told.admin], tmp_path) == []


def test_no_process_has_one_in_its_arguments_and_the_gateways_have_none_in_their_environment(told: Told) -> None:
    process = told.gateway.process
    assert process is not None
    pids = [process.pid, *children(process.pid)]
    workers = 2 if "--workers" in process.args else 0  # type: ignore[operator]
    assert len(pids) == 1 + workers
    told.watch.look()
    assert told.watch.has("turngate.proxy.cli", str(told.gateway.store))
    assert not workers or told.watch.has("turngate.proxy.workers.process")
    for secret in (*told.secrets, told.admin):
        assert not told.watch.has(secret)
        assert not [pid for pid in pids if secret.encode() in environment(pid)]


def test_the_key_file_is_its_owners_alone_and_another_is_refused(told: Told, tmp_path: Path) -> None:
    file = told.gateway.store / "admin.key"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    open_to_all = tmp_path / "admin.key"
    open_to_all.write_text("tg-admin-1\n")
    open_to_all.chmod(0o644)
    other = GatewayProcess(told.fake.url, tmp_path / "store", "--admin-key-file", str(open_to_all))
    with pytest.raises(RuntimeError, match="chmod 600"):
        other.start()


def test_what_knows_a_session_keeps_its_hash_alone(told: Told) -> None:
    shown = json.dumps([one.model_dump(mode="json") for one in told.gateway.client.open_rollouts()])
    assert "tg-" not in shown
    assert "base_url" not in shown
