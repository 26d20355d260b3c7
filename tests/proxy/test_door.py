"""The gateway's door: who is answered at all, how much may come in, how much at once; and nothing for other sites."""

from __future__ import annotations

import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.fake_engine.settings import FakeSettings
from tests.proxy.conftest import Gate, StartFake, StartGateway
from tests.proxy.probing import gauge, refuses_what_exceeds_limits, wait_for
from tests.proxy.test_faults import FIRST_TRY
from turngate.proxy.serve import parser
from turngate.proxy.settings import GatewaySettings

BODY = {"messages": [{"role": "user", "content": "Hi"}]}
PATHS = ("/metrics", "/openapi.json", "/healthz", "/status", "/v1/models", "/nothing")


@pytest.mark.parametrize("path", PATHS)
def test_a_page_of_another_site_reaches_nothing_by_dns_rebinding(gate: Gate, path: str) -> None:
    answer = httpx.get(gate.gateway.url + path, headers={"host": "evil.example"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (421, "unknown_host")


def test_agents_reach_it_by_localhost_and_by_address(gate: Gate) -> None:
    created, _ = gate.says(["Hello."]).session()
    for host in ("localhost", "127.0.0.1"):
        url = created.base_url.replace("127.0.0.1", host) + "/chat/completions"
        assert httpx.post(url, json=BODY).status_code == 200


def test_no_answer_lets_another_site_read_it(gate: Gate) -> None:
    created, _ = gate.says(["Hello."]).session()
    origin = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    answers = [httpx.request("OPTIONS", gate.gateway.url + path, headers=origin) for path in (*PATHS, "/rollouts")]
    answers += [httpx.get(gate.gateway.url + path, headers=origin) for path in PATHS]
    answers.append(httpx.post(f"{created.base_url}/chat/completions", json=BODY, headers=origin))
    for answer in answers:
        assert not [name for name in answer.headers if name.startswith("access-control")]
    assert {answer.status_code for answer in answers if answer.request.method == "OPTIONS"} <= {404, 405}


def test_it_listens_on_this_machine_alone_unless_told_otherwise(gate: Gate) -> None:
    assert GatewaySettings.model_fields["host"].default == "127.0.0.1"
    assert parser().parse_args(["--engine", "http://e", "--store", "s"]).host is None
    listening = [
        line.split()[1]
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in Path(table).read_text().splitlines()[1:]
        if line.split()[3] == "0A" and line.split()[1].endswith(f":{gate.gateway.port:04X}")
    ]
    assert listening == [f"0100007F:{gate.gateway.port:04X}"]


def test_bodies_are_limited_whoever_sends_them(start_fake: StartFake, start_gateway: StartGateway) -> None:
    gateway = start_gateway(start_fake(["Hello."]).url, "--max-body-bytes", "2000", "--max-header-bytes", "4000")
    created, _ = gateway.session()
    key = {"authorization": f"Bearer {(gateway.store / 'admin.key').read_text().strip()}"}
    big = b'{"task": "' + b"x" * 3000 + b'"}'

    def chunks() -> object:
        yield from (big[:1500], big[1500:])

    for url in (f"{created.base_url}/chat/completions", f"{gateway.url}/rollouts"):
        for content in (big, chunks()):
            headers = {**key, "content-type": "application/json"} if url.endswith("/rollouts") else {}
            answer = httpx.post(url, content=content, headers=headers)  # type: ignore[arg-type]
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    answer = httpx.get(f"{gateway.url}/healthz", headers={"x-long": "y" * 9000})
    assert (answer.status_code, answer.json()["error"]["code"]) == (431, "headers_too_large")
    assert httpx.post(f"{created.base_url}/chat/completions", json=BODY).status_code == 200


def test_requests_at_once_are_limited_and_others_told_to_retry(
    start_fake: StartFake, start_gateway: StartGateway
) -> None:
    fake = start_fake(["A rather long answer, word after word."], settings=FakeSettings(tokens_per_s=10.0))
    gateway = start_gateway(fake.url, "--max-concurrency", "4", "--max-session-concurrency", "2")
    crowded, roomy = gateway.session()[0], gateway.session()[0]

    def ask(url: str) -> tuple[int, str]:
        answer = httpx.post(f"{url}/chat/completions", json=BODY, headers=FIRST_TRY, timeout=60)
        return answer.status_code, answer.json().get("error", {}).get("code", "")

    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(ask, [crowded.base_url] * 3)) == [(200, ""), (200, ""), (429, "too_many_requests")]
        answers = list(pool.map(ask, [gateway.session()[0].base_url for _ in range(8)]))
    assert sorted(set(answers)) == [(200, ""), (429, "too_many_requests")]
    assert ask(roomy.base_url)[0] == 200


def test_googles_paths_count_and_are_refused_in_their_own_form_by_the_door(
    start_fake: StartFake, start_gateway: StartGateway
) -> None:
    fake = start_fake(["A rather long answer, word after word."], settings=FakeSettings(tokens_per_s=10.0))
    gateway = start_gateway(fake.url, "--max-concurrency", "2")
    created, _ = gateway.session()
    contents = {"contents": [{"parts": [{"text": "Hi"}]}]}

    def ask(number: int) -> tuple[int, str]:
        url = f"{gateway.url}/v1beta/models/m:generateContent"
        key = {"x-goog-api-key": created.api_key, **FIRST_TRY}
        answer = httpx.post(url, json=contents, headers=key, timeout=60)
        return answer.status_code, answer.json().get("error", {}).get("status", "")

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(ask, range(4))) == {(200, ""), (429, "RESOURCE_EXHAUSTED")}
    assert ask(0) == (200, "")


def test_open_sessions_are_limited_also_after_a_restart(start_fake: StartFake, start_gateway: StartGateway) -> None:
    gateway = start_gateway(start_fake(["Hello."]).url, "--max-sessions", "2")
    created = [gateway.session()[0] for _ in range(2)]
    gateway.stop()
    gateway.start()
    key = {"authorization": f"Bearer {(gateway.store / 'admin.key').read_text().strip()}"}
    answer = httpx.post(f"{gateway.url}/rollouts", json={"task": "t"}, headers=key)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many_requests")
    httpx.post(f"{gateway.url}/rollouts/{created[0].id}/finish", json={"reward": 1}, headers=key)
    assert httpx.post(f"{gateway.url}/rollouts", json={"task": "t"}, headers=key).status_code == 201


def test_a_name_is_answered_once_it_is_allowed(start_fake: StartFake, start_gateway: StartGateway) -> None:
    gateway = start_gateway(start_fake(["Hello."]).url, "--allow-host", "gate.example")
    for host, status in (("gate.example", 200), ("gate.example:8400", 200), ("other.example", 421)):
        assert httpx.get(f"{gateway.url}/healthz", headers={"host": host}).status_code == status


def test_what_is_no_http_is_a_400_with_words(gate: Gate) -> None:
    for raw in (b"\x16\x03\x01\x00\xa5 not http\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"POST http:// HTTP/1.1\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", gate.gateway.port)) as client:
            client.sendall(raw)
            client.settimeout(30)
            answer = b"".join(iter(lambda: client.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 400 "), (raw, answer)
        assert b'"code":"not_http"' in answer


def test_what_is_refused_before_any_route_is_counted(start_fake: StartFake, start_gateway: StartGateway) -> None:
    gateway = start_gateway(start_fake(["Hello."]).url, "--max-connections", "3", "--max-header-bytes", "4000")
    url = f"{gateway.url}/healthz"
    assert httpx.get(url, headers={"host": "evil.example"}).status_code == 421
    assert httpx.get(url, headers={"x-long": "y" * 9000}).status_code == 431
    big = b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000000000\r\n\r\n"
    for raw, status in ((big, b"413"), (b"no http\r\n\r\n", b"400")):
        with socket.create_connection(("127.0.0.1", gateway.port)) as client:
            client.sendall(raw)
            assert client.recv(65536).startswith(b"HTTP/1.1 " + status)
    with ExitStack() as stack:
        many = [stack.enter_context(socket.create_connection(("127.0.0.1", gateway.port))) for _ in range(5)]
        assert wait_for(lambda: _closed(many) >= 2)
    codes = ("unknown_host", "headers_too_large", "body_too_large", "not_http")
    assert wait_for(lambda: httpx.get(f"{gateway.url}/metrics").is_success)
    assert [gauge(gateway, f'turngate_refusals_total{{code="{code}"}}') for code in codes] == [1, 1, 1, 1]
    assert gauge(gateway, 'turngate_refusals_total{code="too_many_connections"}') >= 2


def _closed(clients: list[socket.socket]) -> int:
    closed = 0
    for client in clients:
        client.setblocking(False)
        try:
            closed += client.recv(1) == b""
        except BlockingIOError:
            continue
        except ConnectionResetError:
            closed += 1
    return closed


def test_help_names_every_limit() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "turngate.proxy.cli", "proxy", "--help"], capture_output=True, text=True, check=True
    ).stdout
    for option in ("--max-body-bytes", "--max-concurrency", "--max-sessions", "--allow-host", "--min-free-bytes"):
        assert option in shown


def test_every_way_to_a_turn_has_the_same_limits(start_fake: StartFake, start_gateway: StartGateway) -> None:
    """The short way before the framework as well as its routes: none goes round the door."""
    gateway = start_gateway(start_fake(["Hello."]).url, "--max-body-bytes", "20000")
    for prefix in ("/s/{secret}/v1", "/s/{secret}", "/v1", "/v1//", "//v1"):
        if "//" in prefix:
            created, _ = gateway.session()
            key = {"authorization": f"Bearer {created.api_key}", "host": "evil.example"}
            assert httpx.post(f"{gateway.url}{prefix}/chat/completions", json=BODY, headers=key).status_code == 421
        else:
            refuses_what_exceeds_limits(gateway, prefix, max_body_bytes=20_000)
