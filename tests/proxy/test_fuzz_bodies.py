"""Sound bodies of every dialect, spoiled in one place or cut at one byte: never a 500, and the session goes on after.

What the OpenAPI description's fuzzer does not send: bytes that are no JSON, a body sent twice, deep and huge values in
the middle of what is right.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.proxy.conftest import Gate
from turngate.proxy.verify import verify_store

_TOOL = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
_SAID = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}, {"role": "user", "content": "hm"}]
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": _SAID, "tools": [{"type": "function", "function": _TOOL}], "max_tokens": 4},
    "messages": {
        "messages": _SAID,
        "system": "s",
        "tools": [{"name": "f", "input_schema": _TOOL["parameters"]}],
        "max_tokens": 4,
    },
    "responses": {"input": _SAID, "tools": [{"type": "function", **_TOOL}], "max_output_tokens": 4},
    "models/m:generateContent": {
        "contents": [{"role": "user", "parts": [{"text": "hi"}]}, {"role": "model", "parts": [{"text": "ho"}]}],
        "tools": [{"functionDeclarations": [_TOOL]}],
        "generationConfig": {"maxOutputTokens": 4},
    },
}
_DEEP = json.loads("[" * 400 + "]" * 400)
_SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
_ODD = st.sampled_from([_DEEP, 10**400, -(2**63) - 1, "\ud800", {"": {}}, [[]], [None], 1e308, "x" * 70_000])
VALUES = _ODD | st.recursive(_SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner))


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of everything in `value`, itself first."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, item in inner for found in places(item, (*path, key)))]


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """`value` with `new` at `path`."""
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


@st.composite
def spoiled(draw: st.DrawFn, body: dict[str, Any]) -> bytes:
    """One place is another value; or bytes are cut, put in or sent twice."""
    if draw(st.booleans()):
        return json.dumps(replaced(body, draw(st.sampled_from(places(body))), draw(VALUES))).encode()
    data = json.dumps(body).encode()
    at = draw(st.integers(0, len(data)))
    return data[:at] + draw(st.binary(max_size=4)) + draw(st.sampled_from([b"", data[at:], data]))


@pytest.mark.parametrize("path", BODIES)
def test_a_spoiled_body_is_refused_or_served_and_the_session_goes_on(gate: Gate, path: str) -> None:
    gateway = gate.says(["Hello."])
    created, _ = gateway.session()

    @settings(
        max_examples=40,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(data=spoiled(BODIES[path]))
    def run(data: bytes) -> None:
        answer = httpx.post(f"{created.base_url}/{path}", content=data, timeout=60)
        assert answer.status_code < 500, (data[:500], answer.text)
        assert answer.status_code == 200 or answer.json()["error"]["message"]
        assert created.api_key not in answer.text

    run()
    assert httpx.post(f"{created.base_url}/{path}", json=BODIES[path], timeout=60).status_code == 200
    assert '"trace"' not in gateway.log.read_text()
    assert verify_store(gateway.store).problems == []
