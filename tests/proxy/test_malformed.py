"""Bodies that are wrong in every way we could think of: never a 500, always words that say what to do."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest

from tests.proxy.conftest import Gate, StartFake, StartGateway
from turngate.proxy.plain import MAX_DEPTH, TooDeep, check_depth, mend_escapes, plain
from turngate.proxy.sampling import resolve

DEEP = "[" * 800 + "]" * 800
USER: list[Any] = [{"role": "user", "content": "hi"}]


def assistant(**fields: Any) -> dict[str, Any]:
    return {"messages": [*USER, {"role": "assistant", **fields}, *USER]}


def call(**fields: Any) -> dict[str, Any]:
    return assistant(tool_calls=[{"id": "a", "type": "function", **fields}])


REFUSED: list[Any] = [
    *("", "null", "[]", "{}", "[" * 100_000, b'{"messages": "\xff"}', b"\x1f\x8bgzip"),
    '{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
    '{"messages": [{"role": "user", "content": [{"type": "x", "y": %s}]}]}'.replace("%s", DEEP),
    '{"messages": [{"role": "user", "content": "x"}], "tools": [{"function": {"name": "f", "x": %s}}]}'.replace(
        "%s", DEEP
    ),
    '{"messages": [{"role": "user", "content": "x"}], "max_tokens": 100000000000000000000000}',
    *({"messages": [{"role": role, "content": "x"}]} for role in (None, 5, ["user"], {}, "robot")),
    *({"messages": [{"role": "user", "content": content}]} for content in (5, {"a": 1}, [1], [None])),
    *(
        {"messages": [{"role": "user", "content": [part]}]}
        for part in ({"type": ["text"]}, {"type": "text", "text": 5})
    ),
    {"messages": [{"role": "user", "content": "x", "name": {"a": 1}}]},
    {"messages": [*USER, {"role": "tool", "tool_call_id": {"a": 1}, "content": "x"}]},
    *(assistant(tool_calls=calls) for calls in (5, "abc", {"a": 1}, [None], [{"id": "x"}])),
    *(call(function=function) for function in ("f", [], {"name": ["x"]}, {"name": "f", "arguments": 5})),
    *({"messages": USER, "tools": tools} for tools in (5, {}, [5], [{"function": "f"}])),
    *({"messages": USER, "stop": stop} for stop in (5, "", [""], {"a": 1})),
    *({"messages": USER, **more} for more in ({"stream": "yes"}, {"stream_options": 5}, {"model": 5}, {"n": "x"})),
    *({"messages": USER, **more} for more in ({"max_tokens": 0}, {"stop_token_ids": "x"}, {"logit_bias": 5})),
    *({"messages": USER, **more} for more in ({"bad_words": 5}, {"min_tokens": -1}, {"ignore_eos": "x"})),
    *({"messages": USER, "top_k": top_k} for top_k in (-2, 2**31)),
]

TAKEN: list[Any] = [
    {"messages": [*USER, {"role": "tool", "content": "no id"}]},
    {"messages": [*USER, {"role": "assistant"}, *USER]},
    {"messages": [*USER, {"role": "assistant", "content": None}, *USER]},
    {"messages": [*USER, {"role": "assistant", "content": ""}, *USER]},
    call(id=7, function={"name": "f", "arguments": DEEP}),
    '{"messages": [{"role": "user", "content": "a"}], "messages": [{"role": "user", "content": "b"}]}',
    '{"messages": [{"role": "user", "content": "cut \\ud83d"}]}',
    '{"messages": [{"role": "user", "content": "x"}], "seed": 9223372036854775807}',
]


def encoded(body: Any) -> bytes:
    if isinstance(body, bytes):
        return body
    return body.encode() if isinstance(body, str) else json.dumps(body).encode()


@pytest.mark.parametrize("body", REFUSED, ids=lambda body: encoded(body)[:60].decode("ascii", "replace"))
def test_a_wrong_body_is_a_400_with_words(gate: Gate, body: Any) -> None:
    created, _ = gate.says(["Hello."]).session()
    answer = httpx.post(f"{created.base_url}/chat/completions", content=encoded(body))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert len(error["message"]) > 10


@pytest.mark.parametrize("stream", [False, True])
def test_odd_bodies_are_turns_like_others_and_the_session_goes_on(gate: Gate, stream: bool) -> None:
    gateway = gate.says(["Hello."])
    created, _ = gateway.session()
    url = f"{created.base_url}/chat/completions"
    for body in TAKEN:
        raw = encoded(body)
        answer = httpx.post(url, content=raw[:-1] + b', "stream": true}' if stream else raw)
        assert answer.status_code == 200, (body, answer.text)
    assert httpx.post(url, json={"messages": USER}).status_code == 200
    assert gateway.client.rollout(created.id).turns == len(TAKEN) + 1


def test_half_a_character_continues_its_own_turn_when_it_is_echoed(gate: Gate) -> None:
    gateway = gate.says(["Hello."])
    created, _ = gateway.session()
    cut = '{"role": "user", "content": "cut \\ud83d"}'
    url = f"{created.base_url}/chat/completions"
    for head in ("", f'{cut}, {{"role": "assistant", "content": "Hello."}}, '):
        assert httpx.post(url, content=f'{{"messages": [{head}{cut}]}}').status_code == 200
    assert gateway.client.rollout(created.id).breaks == 0


ADMIN: list[tuple[str, str, int]] = [
    ("/rollouts", '{"task": "\\ud800"}', 201),
    ("/rollouts", '{"task": "a", "metadata": {"x": ["\\ud800", NaN]}}', 201),
    ("/rollouts", '{"task": "a", "metadata": {"x": %s}}'.replace("%s", DEEP), 400),
    ("/rollouts", '{"task": "a", "metadata": %s}' % ("[" * 100_000), 400),
    ("/rollouts", '{"task": "a", "group": "g", "group_size": 123456789012345678901234567890}', 400),
    ("/rollouts", '{"task": "a", "group": "g", "group_size": 3, "group_deadline_s": 1e300}', 400),
    ("/rollouts", '{"task": "a", "group": "g", "group_size": 3, "group_deadline_s": Infinity}', 400),
    ("/rollouts", '{"task": "a", "deadline_s": Infinity}', 400),
    ("/rollouts", '{"task": "a", "sampling": {"max_tokens": "x"}}', 400),
    ("/rollouts", '{"task": "a", "sampling": {"max_tokens": 0}}', 400),
    ("/rollouts", '{"task": "a", "sampling": {"stop_token_ids": "x"}}', 400),
    ("/rollouts", '{"task": "a", "sampling": {"temperature": NaN}}', 400),
    ("/rollouts", '{"task": "a", "training": "true"}', 400),
    ("/rollouts", '{"task": "a", "budgets": {"max_requests": true}}', 400),
    ("/rollouts", '{"task": "a", "budgets": {"max_wall_s": "5"}}', 400),
    ("/rollouts", '{"task": "a", "budgets": {"max_wall_s": 5}, "deadline_s": 60}', 201),
    ("/leases", '{"policy": "\\ud800"}', 404),
    ("/leases", '{"policy": "policy", "max_groups": 123456789012345678901234567890}', 400),
    ("/leases", '{"policy": "policy", "ttl_s": Infinity}', 400),
    ("/leases/x/heartbeat", '{"epoch": 1, "ttl_s": 1e300}', 400),
    ("/leases/x/ack", '{"epoch": 1, "step": 123456789012345678901234567890, "groups": []}', 400),
    ("/checkpoints", '{"policy": "policy", "path": "x", "step": 123456789012345678901234567890}', 400),
    ("/resume", '{"policy": "policy", "step": 123456789012345678901234567890}', 400),
    ("/adapters", '{"policy": "policy", "step": 0, "path": "%s"}' % ("x" * 5000), 400),
]


@pytest.mark.parametrize(("path", "body", "status"), ADMIN, ids=lambda value: str(value)[:60])
def test_administration_refuses_what_cannot_be_kept(gate: Gate, path: str, body: str, status: int) -> None:
    gateway = gate.says(["Hello."])
    answer = admin(gateway, "POST", path, body)
    assert answer.status_code == status, answer.text
    assert status < 400 or set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_metrics_with_nan_and_half_characters_do_not_spoil_the_list_of_rollouts(gate: Gate) -> None:
    gateway = gate.says(["Hello."])
    created, _ = gateway.session()
    body = '{"reward": 1, "metrics": {"a": NaN, "b": "\\ud800", "c": 12345678901234567890123, "d": [1.5]}}'
    again = [admin(gateway, "POST", f"/rollouts/{created.id}/finish", body) for _ in range(2)]
    assert [answer.status_code for answer in again] == [200, 200]
    assert again[0].json()["metrics"] == {"a": None, "b": "\ufffd", "c": 12345678901234567890123, "d": [1.5]}
    assert admin(gateway, "GET", "/rollouts", None).status_code == 200
    assert admin(gateway, "POST", f"/rollouts/{created.id}/finish", '{"reward": 1, "rewards": {"a": NaN}}').is_error


def test_no_key_is_ever_in_the_log(gate: Gate) -> None:
    gateway = gate.says(["Hello."])
    created, _ = gateway.session()
    for path in ("", "/v1/nothing", "/v1/chat/completions"):
        httpx.post(f"{gateway.url}/s/{created.api_key}{path}", content=b"{")
    log = gateway.log.read_text().replace(f"{gateway.store}", "")
    assert created.api_key not in log
    assert (gateway.store / "admin.key").read_text().strip() not in log


def test_what_is_no_request_is_answered_but_cannot_fill_the_log(
    start_fake: StartFake, start_gateway: StartGateway
) -> None:
    gateway = start_gateway(start_fake(["Hello."]).url, "--log-level", "info")
    before = gateway.log.read_text()
    upgrade = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    for data, status in ((b"\x16\x03\x01 no HTTP\r\n\r\n", b"400"), (upgrade, b"200")):
        with socket.create_connection(("127.0.0.1", httpx.URL(gateway.url).port or 0), timeout=30) as connection:
            connection.sendall(data)
            assert connection.recv(1000).startswith(b"HTTP/1.1 " + status)
    assert gateway.log.read_text() == before


def test_a_body_that_is_not_said_to_be_json_is_told_so(gate: Gate) -> None:
    gateway = gate.says(["Hello."])
    key = (gateway.store / "admin.key").read_text().strip()
    refused = httpx.post(
        f"{gateway.url}/rollouts", data={"task": "curl without a header"}, headers={"authorization": f"Bearer {key}"}
    )
    assert (refused.status_code, refused.json()["error"]["message"]) == (
        400,
        "the body was not read as JSON: send it with `Content-Type: application/json`",
    )


def test_a_body_cut_short_is_told_where(gate: Gate) -> None:
    refused = admin(gate.says(["Hello."]), "POST", "/rollouts", '{"task":')
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "the body is not valid JSON: Expecting value at character 8"


def test_keys_of_one_kind_open_nothing_of_the_other(gate: Gate) -> None:
    gateway = gate.says(["Hello."])
    created, _ = gateway.session()
    key = (gateway.store / "admin.key").read_text().strip()
    assert (
        httpx.get(f"{gateway.url}/rollouts", headers={"authorization": f"Bearer {created.api_key}"}).status_code == 401
    )
    assert httpx.get(f"{gateway.url}/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 404
    assert httpx.get(f"{gateway.url}/rollouts", headers={b"authorization": b"Bearer \xff\xfe"}).status_code == 401


def admin(gateway: Any, method: str, path: str, body: str | None) -> httpx.Response:
    key = (gateway.store / "admin.key").read_text().strip()
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    return httpx.request(method, f"{gateway.url}{path}", content=body, headers=headers)


class TestPlain:
    @pytest.mark.parametrize(
        ("raw", "text"),
        [
            (r'"a\ud800b"', "a\ufffdb"),
            (r'"\ud83d\ude00"', "\U0001f600"),
            (r'"\\ud800"', "\\ud800"),
            (r'"\ud800\ud83d\ude00"', "\ufffd\U0001f600"),
            (r'"\udc00\uD800"', "\ufffd\ufffd"),
            (r'"\\\ud800x"', "\\\ufffdx"),
        ],
    )
    def test_only_halves_of_pairs_are_mended(self, raw: str, text: str) -> None:
        assert json.loads(mend_escapes(raw.encode())) == text

    def test_sound_values_stay_as_they_are(self) -> None:
        value = {"a": [1, 2.5, None, True, "é😀"], "b": {"c": float("inf")}}
        assert plain(value) == value
        assert plain(value, nulls=True)["b"] == {"c": None}

    def test_depth_counts_containers(self) -> None:
        check_depth(json.loads("[" * MAX_DEPTH + "]" * MAX_DEPTH))
        with pytest.raises(TooDeep):
            check_depth(json.loads("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1)))


def test_min_tokens_that_no_longer_fit_are_clamped_because_engines_refuse_them() -> None:
    sampling = resolve({}, {"min_tokens": 50}, {}, 20)
    assert (sampling.params["min_tokens"], sampling.params["max_tokens"]) == (20, 20)
    assert "clamped:min_tokens" in sampling.notes


def test_wishes_that_change_the_distribution_are_flagged() -> None:
    asked = {"logit_bias": {"5": 1.0}, "response_format": {"type": "json_object"}, "min_tokens": 0, "temperature": 1.0}
    assert resolve({}, asked, {}, 20).notes == ("shaped:logit_bias", "shaped:response_format")
    assert resolve({}, {"response_format": {"type": "text"}}, {}, 20).notes == ()
