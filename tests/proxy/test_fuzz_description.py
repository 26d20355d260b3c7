"""Schemathesis drives the OpenAPI description against a running gateway: no 500, and every answer is as described.

A few examples an operation in each run; `make test-long` tries many. Turns that the fuzzer takes must leave the
gateway as it was: nothing in flight, and its store verifies.
"""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.specs.openapi import checks

from tests.proxy.conftest import Gate
from tests.proxy.probing import at_rest
from turngate.proxy.app import build_app
from turngate.proxy.settings import GatewaySettings
from turngate.proxy.verify import verify_store

SCHEMA = schemathesis.openapi.from_dict(
    build_app(GatewaySettings(engines=["http://engine"], store="store")).openapi()  # type: ignore[arg-type]
)
OPERATIONS = [result.ok() for result in SCHEMA.get_all_operations()]
CHECKS = [
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]
EXAMPLES = int(os.environ.get("TURNGATE_FUZZ_EXAMPLES", "12"))


def keys(gate: Gate, path: str) -> dict[str, str]:
    """The right key of an operation."""
    if path.startswith("/v1/"):
        return {"authorization": f"Bearer {gate.gateway.session()[0].api_key}"}
    return {"authorization": f"Bearer {(gate.gateway.store / 'admin.key').read_text().strip()}"}


def fuzz(gate: Gate, operation: Any, mode: Any, examples: int) -> None:
    """Call one operation with generated cases, with a key, and check each answer."""
    headers = keys(gate.says(["Hello."]) and gate, operation.path)
    body = operation.method == "post"  # an unknown query is ignored, an unknown key of a body is not
    wanted = CHECKS if mode.is_negative and body else CHECKS[:-1]

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        answer = case.call(base_url=gate.gateway.url, headers=headers, timeout=60)
        case.validate_response(answer, checks=wanted, headers=headers)

    run()


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda one: one.label)
def test_answers_are_as_described(gate: Gate, operation: Any) -> None:
    for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
        fuzz(gate, operation, mode, EXAMPLES)
    assert at_rest(gate.gateway)


@pytest.mark.long
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda one: one.label)
def test_answers_are_as_described_a_thousand_times(gate: Gate, operation: Any) -> None:
    for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
        fuzz(gate, operation, mode, 500)
    assert at_rest(gate.gateway)


def test_nothing_is_opened_without_its_key(gate: Gate) -> None:
    for operation in OPERATIONS:
        path = operation.path.replace("{", "").replace("}", "")
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic dTpw"}, {"x-api-key": "wrong"}):
            answer = httpx.request(operation.method, gate.gateway.url + path, json={}, headers=headers)
            assert answer.status_code in ((401, 404) if path.startswith("/v1/") else (401,)), (path, headers)
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_every_operation_is_fuzzed_and_says_its_errors() -> None:
    assert len(OPERATIONS) >= 15
    for operation in OPERATIONS:
        assert {"400", "401", "404", "413", "429", "502", "503", "507"} <= set(operation.definition.raw["responses"])


@given(word=st.text(max_size=60))
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True)
def test_any_path_is_an_answer_in_the_same_shape(gate: Gate, word: str) -> None:
    answer = httpx.get(f"{gate.gateway.url}/{quote(word, safe='', errors='replace')}")
    assert answer.status_code in (200, 307, 400, 401, 404, 405)
    assert answer.status_code in (200, 307) or set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_what_the_fuzzers_left_verifies(gate: Gate) -> None:
    created, _ = gate.says(["Hello."]).session()
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    assert httpx.post(f"{created.base_url}/chat/completions", json=body).status_code == 200
    assert gate.gateway.client.rollout(created.id).turns == 1
    assert verify_store(gate.gateway.store).problems == []
