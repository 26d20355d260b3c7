"""Rescoring asks the engine the right question in both of its ways, and says what it could not compare."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from tests.proxy.store.samples import make_rollout_turns
from turngate.proxy.rescore import RescoreError, Rescorer, choose, comparable
from turngate.proxy.turns import Span, Turn, by_id, path_ids

CONTEXT_TOKENS = 64


def true_logprob(prefix: list[int], token: int) -> float:
    """A made-up model: a log-prob that depends on every token before."""
    return -((sum(prefix) * 7 + token) % 1000) / 100 - 0.01


class Engine(BaseHTTPRequestHandler):
    """The answers of vLLM that rescoring reads, in its shapes."""

    lora: bool
    asked: list[str]

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            models = [{"id": "base", "parent": None, "max_model_len": CONTEXT_TOKENS}]
            return self._answer({"data": models + [{"id": "policy-run1-v1", "parent": "base"}] * self.lora})
        return self._answer({"paths": {"/v1/completions": {}}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append(self.path)
        if self.path == "/v1/completions":
            ids = body["prompt"]
            listed = [{str(t): {"logprob": true_logprob(ids[:i], t)}} if i else None for i, t in enumerate(ids)]
            return self._answer({"choices": [{"prompt_logprobs": listed}]})
        token = body["sampling_params"]["logprob_token_ids"][0]
        top = [{"token_id": 1, "logprob": -9.0}, {"token_id": token, "logprob": true_logprob(body["token_ids"], token)}]
        return self._answer({"choices": [{"logprobs": {"content": [{"token_id": 1, "top_logprobs": top}]}}]})

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def _answer(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture(params=[False, True], ids=["plain", "lora"])
def engine(request: pytest.FixtureRequest) -> Iterator[ThreadingHTTPServer]:
    handler = type("ThisEngine", (Engine,), {"lora": request.param, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def url(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}/v1"


def sampled_turns() -> dict[str, Turn]:
    """Turns whose log-probs are the made-up model's."""
    known = by_id(make_rollout_turns("r"))
    for turn in list(known.values()):
        ids, start = path_ids(known, turn).tolist(), turn.prompt_tokens
        logprobs = [true_logprob(ids[:at], ids[at]) for at in range(start, len(ids))]
        known[turn.id] = replace(turn, logprobs=np.asarray(logprobs, np.float32))
    return known


def test_recorded_and_recomputed_agree(engine: ThreadingHTTPServer) -> None:
    known = sampled_turns()
    with Rescorer(url(engine), tolerance=0.01) as rescorer:
        for turn in known.values():
            rescorer.check(known, turn)
    result = rescorer.result
    assert (result.turns, result.tokens, result.problems) == (3, 15, [])
    assert result.max_delta < 1e-6


def test_an_engine_with_adapters_is_never_asked_for_prompt_logprobs(engine: ThreadingHTTPServer) -> None:
    known = sampled_turns()
    with Rescorer(url(engine), tolerance=0.01) as rescorer:
        rescorer.check(known, known["r-turn-0"])
    handler: Any = engine.RequestHandlerClass
    assert set(handler.asked) == {"/inference/v1/generate" if handler.lora else "/v1/completions"}


def test_a_changed_turn_is_named(engine: ThreadingHTTPServer) -> None:
    known = sampled_turns()
    changed = replace(known["r-turn-1"], logprobs=np.roll(known["r-turn-1"].logprobs, 1))
    with Rescorer(url(engine), tolerance=0.01) as rescorer:
        rescorer.check(known, changed)
    assert len(rescorer.result.problems) == 1
    assert "turn r-turn-1 (seq 1)" in rescorer.result.problems[0]


def test_what_cannot_be_compared_is_counted(engine: ThreadingHTTPServer) -> None:
    known = sampled_turns()
    gone = replace(known["r-turn-0"], spans=(Span(0, 5, "policy", 9, "policy-run1-v9"),))
    long = replace(known["r-turn-0"], tail_ids=np.ones(CONTEXT_TOKENS, np.int32))
    with Rescorer(url(engine), tolerance=0.01) as rescorer:
        rescorer.check(known, gone)
        rescorer.check(known, long)
    assert (rescorer.result.turns, rescorer.result.not_loaded, rescorer.result.too_long) == (0, 1, 1)


@pytest.mark.parametrize("setting", [{"temperature": 0.7}, {"top_p": 0.9}, {"logit_bias": {"5": 1}}, {"min_tokens": 3}])
def test_only_the_models_own_distribution_is_comparable(setting: dict[str, Any]) -> None:
    turn = make_rollout_turns("r")[0]
    assert comparable(turn)
    assert not comparable(replace(turn, sampling_used={**turn.sampling_used, **setting}))


def test_the_same_seed_chooses_the_same_turns() -> None:
    places = [("r", str(number)) for number in range(100)]
    assert choose(places, 10, seed=1) == choose(reversed(places), 10, seed=1) != choose(places, 10, seed=2)
    assert len(choose(places, 1000, seed=1)) == 100


def test_no_engine_is_said(unused_tcp_port: int) -> None:
    with pytest.raises(RescoreError, match="does not answer /v1/models"):
        Rescorer(f"http://127.0.0.1:{unused_tcp_port}", tolerance=1)
