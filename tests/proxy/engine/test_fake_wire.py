"""The fake engine answers recorded requests in the shape the real vLLM answered them."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.fake_engine import FakeEngine, FakeSettings, Script

WIRE = pathlib.Path(__file__).parents[2] / "fixtures" / "wire" / "vllm-0.32"
SAME = ("render", "render_tools", "tokenize")
MODELS = {"hermes": "qwen-coder-0.5b", "no-parser": "smollm2-135m"}
NAMES = sorted(path.stem for path in (WIRE / "hermes").glob("*.json"))


@pytest.fixture(scope="module", params=sorted(MODELS))
def fake(request: pytest.FixtureRequest, model_dir: Callable[[str], pathlib.Path]) -> Iterator[tuple[str, FakeEngine]]:
    """The fake in the place of the server that was recorded."""
    kind: str = request.param
    settings = FakeSettings(model=MODELS[kind], max_model_len=8192, parser=kind == "hermes")
    with FakeEngine(model_dir(MODELS[kind]), Script(filler_chars=40), settings=settings) as engine:
        yield kind, engine


def shape(value: Any) -> Any:
    """Key sets all the way down; a list is the union of its elements' shapes."""
    if isinstance(value, dict):
        return {key: shape(one) for key, one in value.items()}
    if isinstance(value, list):
        merged: Any = None
        for one in value:
            merged = union(merged, shape(one))
        return [merged]
    return None


def union(one: Any, other: Any) -> Any:
    """Shapes of two list elements in one."""
    if isinstance(one, dict) and isinstance(other, dict):
        return {key: union(one.get(key), other.get(key)) for key in one.keys() | other.keys()}
    if isinstance(one, list) and isinstance(other, list):
        return [union(one[0], other[0])]
    return one if other is None else other


@pytest.mark.parametrize("name", NAMES)
def test_recorded_requests_get_answers_of_the_recorded_shape(fake: tuple[str, FakeEngine], name: str) -> None:
    kind, engine = fake
    recorded = json.loads((WIRE / kind / f"{name}.json").read_text(encoding="utf-8"))
    body = recorded["request"]
    if name == "render_overflow":
        body["messages"][0]["content"] = "x y " * 40000
    answer = httpx.request(recorded["method"], engine.url + recorded["path"], json=body, trust_env=False, timeout=60)
    assert answer.status_code == recorded["status"]
    if "events" in recorded:
        lines = [line[5:].strip() for line in answer.text.splitlines() if line.startswith("data:")]
        events = [line if line == "[DONE]" else json.loads(line) for line in lines]
        assert shape(events) == shape(recorded["events"])
        assert len(events) == len(recorded["events"])
        assert events[-1] == "[DONE]"
        return
    value = answer.json()
    assert shape(value) == shape(recorded["response"])
    if name in SAME and answer.status_code == 200:
        for key in ("token_ids", "sampling_params", "tokens"):
            assert value.get(key) == recorded["response"].get(key)


@pytest.mark.parametrize("number", range(4))
def test_the_fake_derenders_as_the_real_one(fake: tuple[str, FakeEngine], number: int) -> None:
    kind, engine = fake
    recorded = json.loads((WIRE / kind / f"derender_{number}.json").read_text(encoding="utf-8"))
    answer = httpx.post(engine.url + recorded["path"], json=recorded["request"], trust_env=False).json()
    theirs, ours = recorded["response"]["chunk"]["choices"][0], answer["chunk"]["choices"][0]
    for key in ("role", "content", "reasoning"):
        assert ours["delta"].get(key) == theirs["delta"].get(key)
    functions = [[call["function"] for call in one["delta"].get("tool_calls", ())] for one in (ours, theirs)]
    assert functions[0] == functions[1]
    assert ours["finish_reason"] == theirs["finish_reason"]
    keys = ("output_token_ids", "output_chunk_lens", "tools_streamed") if kind == "hermes" else ()
    for key in keys:
        assert answer["stream_state"][key] == recorded["response"]["stream_state"][key]


def test_tokens_are_rescored_as_they_were_reported(fake: tuple[str, FakeEngine]) -> None:
    _, engine = fake
    prompt = engine.engine.tokens.encode("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")

    def generate(ids: list[int], **params: Any) -> Any:
        body = {"model": engine.engine.settings.model, "token_ids": ids, "sampling_params": params}
        return httpx.post(f"{engine.url}/inference/v1/generate", json=body, trust_env=False).json()["choices"][0]

    said = generate(prompt, max_tokens=3, logprobs=0)
    recorded = [entry["logprob"] for entry in said["logprobs"]["content"]]
    path = prompt + said["token_ids"]
    body = {"model": engine.engine.settings.model, "prompt": path, "max_tokens": 1, "prompt_logprobs": 0}
    listed = httpx.post(f"{engine.url}/v1/completions", json=body, trust_env=False).json()["choices"][0]
    whole = [listed["prompt_logprobs"][at][str(path[at])]["logprob"] for at in range(len(prompt), len(path))]
    single = []
    for at in range(len(prompt), len(path)):
        top = generate(path[:at], max_tokens=1, logprobs=2, logprob_token_ids=[path[at]])["logprobs"]["content"][0]
        single.append(next(one["logprob"] for one in top["top_logprobs"] if one["token_id"] == path[at]))
    assert whole == single == recorded
