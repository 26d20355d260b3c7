"""What operators ask a gateway: is it alive, is it ready, and what do its numbers and logs say."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.proxy.conftest import Gate, StartFake, StartGateway
from tests.proxy.test_faults import BODY, post, wait_for
from turngate.proxy.logs import JsonFormatter
from turngate.proxy.store.space import free_space_bytes
from turngate.proxy.vitals import unwritable

DOCUMENTED = Path(__file__).resolve().parent.parent.parent / "docs/metrics.md"


def exposition(url: str) -> dict[str, float]:
    """Every sample of `/metrics`, by name with labels."""
    text = httpx.get(f"{url}/metrics").text
    return {
        name: float(value)
        for name, value in (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    }


def test_a_gateway_that_can_serve_says_so(gate: Gate) -> None:
    answer = httpx.get(f"{gate.gateway.url}/readyz")
    assert (answer.status_code, answer.json()) == (200, {"ready": True, "missing": []})
    assert httpx.get(f"{gate.gateway.url}/healthz").text == "ok"
    for path in ("/healthz", "/readyz"):  # as some load balancers ask
        assert (httpx.head(f"{gate.gateway.url}{path}").status_code, httpx.head(gate.gateway.url + path).text) == (
            200,
            "",
        )


def test_a_gateway_without_an_engine_lives_but_says_what_is_missing_and_not_where_it_was(
    start_fake: StartFake, start_gateway: StartGateway
) -> None:
    fake = start_fake(["Hello."])
    gateway = start_gateway(fake.url)
    fake.stop()
    assert wait_for(lambda: httpx.get(f"{gateway.url}/readyz").status_code == 503)
    assert httpx.get(f"{gateway.url}/readyz").json()["missing"] == ["no engine is healthy: engine-0"]
    assert httpx.get(f"{gateway.url}/healthz").status_code == 200


def test_a_store_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    assert unwritable(tmp_path) is None
    assert not list(tmp_path.iterdir())
    assert (
        unwritable(tmp_path / "gone")
        == f"the store at {tmp_path / 'gone'} cannot be written: No such file or directory"
    )
    reserve = free_space_bytes(tmp_path) * 2
    assert str(unwritable(tmp_path, reserve)).endswith(f" bytes of space, min_free_bytes is {reserve}")


def test_whatever_is_logged_is_a_line_of_json() -> None:
    record = {"name": "n", "levelname": "INFO", "msg": "half \ud800", "big": 2**70, "odd": {1, 2}}
    line = JsonFormatter().format(logging.makeLogRecord(record))
    assert "\n" not in line
    assert (json.loads(line)["event"], json.loads(line)["big"]) == ("half \ud800", 2**70)


def test_every_metric_is_documented_and_every_documented_one_is_there(gate: Gate) -> None:
    table = DOCUMENTED.read_text().partition("## Trainer")[0]
    documented = set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))
    assert wait_for(lambda: "turngate_engine_kv_usage" in httpx.get(f"{gate.gateway.url}/metrics").text)  # asked for
    text = httpx.get(f"{gate.gateway.url}/metrics").text
    assert set(re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE)) == documented
    assert all(re.search(rf"^# HELP {name} \S", text, re.MULTILINE) for name in documented)


def test_a_turn_is_counted_in_every_histogram(gate: Gate) -> None:
    created, _ = gate.says(["Four words are here."]).session()
    before = exposition(gate.gateway.url)
    assert post(created.base_url).status_code == 200
    after = exposition(gate.gateway.url)
    grown = {name for name in after if after[name] > before.get(name, 0.0)}
    for name in ("turn", "first_token", "overhead", "derender", "commit"):
        assert f"turngate_{name}_seconds_count" in grown
        assert f'turngate_{name}_seconds_bucket{{le="+Inf"}}' in grown
        assert after[f"turngate_{name}_seconds_sum"] >= before[f"turngate_{name}_seconds_sum"]
    assert {'turngate_turns_total{kind="first"}', "turngate_completion_tokens_total"} <= grown
    assert after["turngate_overhead_seconds_sum"] <= after["turngate_turn_seconds_sum"]
    assert (after["turngate_turns_in_flight"], after["turngate_draining"]) == (0, 0)
    assert after["process_resident_memory_bytes"] > 1e6
    assert after["process_open_fds"] > 3


def test_histogram_buckets_only_grow(gate: Gate) -> None:
    samples = exposition(gate.gateway.url)
    for name in ("turngate_turn_seconds", "turngate_loop_lag_seconds"):
        buckets = [value for key, value in samples.items() if key.startswith(f"{name}_bucket")]
        assert buckets == sorted(buckets)
        assert buckets[-1] == samples[f"{name}_count"]


def test_an_engines_failure_is_counted_by_its_kind(start_fake: StartFake, start_gateway: StartGateway) -> None:
    fake = start_fake(["Hello."])
    gateway = start_gateway(fake.url, "--failover-wait-s", "0.1")
    created, _ = gateway.session()
    fake.stop()
    assert post(created.base_url).status_code in (502, 503)
    assert sum(value for name, value in exposition(gateway.url).items() if "engine_errors_total" in name) >= 1


def entries(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]


def test_logs_of_a_turn_carry_its_ids(gate: Gate) -> None:
    created, _ = gate.says(["Hello."]).session()
    turn = post(created.base_url).json()["id"].removeprefix("chatcmpl-")
    kept = [entry for entry in entries(gate.gateway.log) if entry["event"] == "turn_kept"]
    assert (kept[-1]["rollout"], kept[-1]["turn"]) == (created.id, turn)


@pytest.mark.parametrize(("form", "begins"), [("json", "{"), ("text", "20")])
def test_a_gateway_is_quiet_by_default_in_either_format(
    start_fake: StartFake, start_gateway: StartGateway, form: str, begins: str
) -> None:
    gateway = start_gateway(start_fake(["Hello."]).url, "--log-format", form, "--log-level", "info")
    created, _ = gateway.session()
    assert httpx.post(f"{created.base_url}/chat/completions", json=BODY).status_code == 200
    lines = [line for line in gateway.log.read_text().splitlines() if not line.startswith("turngate: ")]
    assert len([line for line in lines if "warning" not in line]) == 1, lines  # that it is ready
    assert all(line.startswith(begins) for line in lines)
    assert created.api_key not in gateway.log.read_text()
