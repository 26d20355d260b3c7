"""The administration API as others use it: its version, and that its page says what it does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest

from tests.proxy.conftest import Gate
from turngate.proxy import errors, wire
from turngate.proxy.client import GatewayClient, GatewayError

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs/http-api.md").read_text()


@pytest.fixture
def http(gate: Gate) -> httpx.Client:
    key = (gate.gateway.store / "admin.key").read_text().strip()
    return httpx.Client(base_url=gate.gateway.url, headers={"authorization": f"Bearer {key}"})


def test_answers_with_and_without_body_and_refusals_say_the_version(gate: Gate, http: httpx.Client) -> None:
    answers = [
        http.get("/status"),
        http.post("/checkpoints", json={"policy": "policy", "step": 0, "path": "x"}),
        http.get("/rollouts/none"),
        httpx.get(f"{gate.gateway.url}/status"),
    ]
    assert [answer.status_code for answer in answers] == [200, 204, 404, 401]
    assert {answer.headers["turngate-api-version"] for answer in answers} == {"1"}
    assert answers[1].content == b""


def test_a_request_for_another_version_is_refused_before_anything_is_done(http: httpx.Client) -> None:
    before = http.get("/status").json()["open_rollouts"]
    refused = http.post("/rollouts", json={"task": "t"}, headers={"turngate-api-version": "2"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "api_version")
    assert http.get("/status").json()["open_rollouts"] == before


def test_side_calls_cannot_be_asked_to_be_trained(http: httpx.Client) -> None:
    for labels, status in ((["main", "subagent", "compaction"], 201), (["main", "side"], 400)):
        answer = http.post("/rollouts", json={"task": "t", "training": False, "trained_labels": labels})
        assert answer.status_code == status, answer.text


def test_the_client_says_its_version(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "API_VERSION", "2")
    key = (gate.gateway.store / "admin.key").read_text().strip()
    with GatewayClient(gate.gateway.url, key) as client, pytest.raises(GatewayError, match="this gateway serves 1"):
        client.status()


def test_the_page_names_the_version_and_every_status() -> None:
    assert f"# HTTP API, version {wire.API_VERSION}\n" in PAGE
    assert f"`{wire.API_HEADER}: {wire.API_VERSION}`" in PAGE
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    statuses = {kind.status for kind in kinds if kind is not errors.GatewayRefusal} - {500}
    assert statuses <= {int(one) for one in re.findall(r"^\| (\d{3}) \|", PAGE, re.MULTILINE)}


def test_the_bodies_shown_are_ones_that_the_gateway_takes(http: httpx.Client) -> None:
    shown = [json.loads(body) for body in re.findall(r"-d '(\{.*?\})'", PAGE)]
    assert len(shown) == 3
    created = http.post("/rollouts", json=shown[0])
    assert created.status_code == 201
    assert set(created.json()) == set(re.findall(r'"(\w+)":', re.findall(r"# -> (\{.*\})", PAGE)[0]))
    assert http.post(f"/rollouts/{created.json()['id']}/finish", json=shown[1]).status_code == 200
    other = http.post("/rollouts", json={**shown[0], "group": "other"}).json()["id"]
    assert http.post(f"/rollouts/{other}/finish", json=shown[2]).status_code == 200


def test_every_field_of_every_body_is_explained() -> None:
    bodies = [one for one in vars(wire).values() if isinstance(one, type) and issubclass(one, wire.Asked)]
    plain = {"policy", "step", "path", "epoch", "ttl_s", "group", "groups"}  # said by the body's own words
    for body in bodies:
        for name, field in body.model_fields.items():
            assert field.description or name in plain, f"{body.__name__}.{name} has no description"
