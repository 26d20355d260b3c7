"""Spans: a rollout is one trace, a turn one span with its parts below it, and nothing of it exists when it is off."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.proxy.conftest import StartFake, StartGateway
from tests.proxy.test_faults import post
from turngate.proxy import wire


class Receiver:
    """An OTLP receiver on loopback; `spans()` are those received."""

    def __init__(self) -> None:
        received: list[bytes] = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                received.append(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                return

        self.received = received
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def spans(self) -> list[Span]:
        requests = [ExportTraceServiceRequest.FromString(body) for body in self.received]
        scopes = [scope for request in requests for part in request.resource_spans for scope in part.scope_spans]
        return [span for scope in scopes for span in scope.spans]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_the_turns_of_a_rollout_are_one_trace_with_its_id(
    start_fake: StartFake, start_gateway: StartGateway, receiver: Receiver
) -> None:
    gateway = start_gateway(start_fake(["Hello."]).url, "--otel", receiver.url)
    created, _ = gateway.session(group="g", group_size=1)
    turns = [post(created.base_url).json()["id"].removeprefix("chatcmpl-") for _ in range(2)]
    gateway.client.finish_rollout(created.id, wire.FinishRollout(reward=0.5))
    gateway.stop()
    spans = receiver.spans()
    assert {span.trace_id.hex() for span in spans} == {created.id.replace("-", "")}
    (whole,) = [span for span in spans if span.name == "rollout"]
    of_turns = {text(span, "turngate.turn"): span for span in spans if span.name == "turn"}
    assert set(of_turns) == set(turns)
    for turn in of_turns.values():
        assert turn.parent_span_id == whole.span_id
        parts = {span.name: span for span in spans if span.parent_span_id == turn.span_id}
        assert set(parts) == {"render", "generate", "commit"}
        (derender,) = [span for span in spans if span.parent_span_id == parts["generate"].span_id]
        assert derender.name == "derender"
        inner = [*parts.values(), derender]
        assert all(turn.start_time_unix_nano <= span.start_time_unix_nano for span in inner)
        assert all(span.start_time_unix_nano <= span.end_time_unix_nano for span in inner)
        assert all(span.end_time_unix_nano <= turn.end_time_unix_nano for span in inner)
    assert not any(created.api_key.encode() in body for body in receiver.received)


def test_a_turn_that_failed_is_a_span_with_the_reason(
    start_fake: StartFake, start_gateway: StartGateway, receiver: Receiver
) -> None:
    fake = start_fake(["Hello."])
    gateway = start_gateway(fake.url, "--otel", receiver.url, "--failover-wait-s", "0.1")
    created, _ = gateway.session()
    fake.stop()
    refused = post(created.base_url)
    gateway.stop()
    (span,) = [span for span in receiver.spans() if span.name == "turn"]
    assert (span.status.code, span.status.message) == (2, refused.json()["error"]["code"])


def test_a_gateway_without_spans_does_not_import_opentelemetry() -> None:
    program = "import sys, turngate.proxy.serve, turngate.proxy.app; sys.exit('opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_spans_without_the_package_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from turngate.proxy.errors import MissingExtra
    from turngate.proxy.gateway import open_tracer

    monkeypatch.delitem(sys.modules, "turngate.proxy.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(MissingExtra, match=r"pip install 'turngate\[otel\]'"):
        open_tracer("http://127.0.0.1:4318", "run")


def text(span: Span, name: str) -> str:
    return next(item.value.string_value for item in span.attributes if item.key == name)
