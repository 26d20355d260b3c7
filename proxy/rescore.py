"""Rescoring a sample of turns through an engine: does it still give the log-probs that were recorded?

Only turns whose sampled distribution is the model's own (temperature 1, nothing filtered, penalised or forced) can be
compared; others, and those of adapters that are no longer loaded, are counted. An engine that can load adapters is
asked for one token at a time: vLLM's prompt log-probs take it down when other requests share the batch
(vllm-project/vllm issue 16668, seen with 0.32).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from turngate.proxy.engine.wire import token_id_of
from turngate.proxy.turns import FloatArray, IntArray, Turn, path_ids

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "temperature": (None, 1, 1.0),
    "top_p": (None, 1, 1.0),
    "top_k": (None, 0, -1),
    "min_p": (None, 0, 0.0),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "min_tokens": (None, 0),
    "logit_bias": (None, {}),
    "bad_words": (None, []),
    "allowed_token_ids": (None, []),
    "structured_outputs": (None, {}),
    "guided_decoding": (None, {}),
}
AT_ONCE = 8  # one-token requests in flight
MEAN_SHARE = 0.25  # a turn's mean |delta| may reach this part of what a single token may differ by


class RescoreError(RuntimeError):
    """The engine could not be asked; the message says why."""


@dataclass(slots=True)
class Rescored:
    """Turns compared and why others were not; differences are |recorded - recomputed| natural log-probs."""

    engine: str
    turns: int = 0
    tokens: int = 0
    max_delta: float = 0.0
    mean_delta: float = 0.0
    not_comparable: int = 0
    not_loaded: int = 0
    too_long: int = 0
    problems: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """As one JSON object."""
        return {name: getattr(self, name) for name in self.__slots__}


def comparable(turn: Turn) -> bool:
    """Whether an engine's prompt log-probs are of the distribution this turn was sampled from."""
    if turn.mode == "demonstration" or len(turn.completion_ids) == 0 or len({span.adapter for span in turn.spans}) != 1:
        return False
    return all(turn.sampling_used.get(key) in neutral for key, neutral in NEUTRAL.items())


class Rescorer:
    """Asks one vLLM server; use as a context manager."""

    def __init__(self, url: str, *, tolerance: float, timeout_s: float = 600.0) -> None:
        self.result = Rescored(url)
        self._tolerance = tolerance
        self._total = 0.0
        self._http = httpx.Client(base_url=url.rstrip("/").removesuffix("/v1"), timeout=timeout_s, trust_env=False)
        self._base, self._max_tokens, self._loaded = self._models()
        self._one_by_one = self._loads_adapters()

    def __enter__(self) -> Rescorer:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def check(self, known: Mapping[str, Turn], turn: Turn) -> None:
        """Compare one turn; `known` are the turns of its rollout by id."""
        result, adapter = self.result, turn.spans[0].adapter
        if adapter is not None and adapter not in self._loaded:
            result.not_loaded += 1
            return
        ids = path_ids(known, turn)
        if len(ids) >= self._max_tokens:
            result.too_long += 1
            return
        scores = self._score(adapter or self._base, ids, turn.prompt_tokens)
        delta = np.abs(scores - turn.logprobs)
        worst = int(np.argmax(delta))
        result.turns += 1
        result.tokens += len(delta)
        result.max_delta = max(result.max_delta, float(delta[worst]))
        self._total += float(delta.sum())
        result.mean_delta = self._total / result.tokens
        if delta[worst] > self._tolerance or delta.mean() > self._tolerance * MEAN_SHARE:
            result.problems.append(
                f"rollout {turn.rollout} turn {turn.id} (seq {turn.seq}): the engine scores token {worst} "
                f"{scores[worst]:.4f}, recorded {turn.logprobs[worst]:.4f} (mean difference {delta.mean():.4f})"
            )

    def _models(self) -> tuple[str, int, frozenset[str]]:
        try:
            answer = self._http.get("/v1/models")
            answer.raise_for_status()
            listed = answer.json()["data"]
            base = next(model for model in listed if not model.get("parent"))
            known = str(base["id"]), int(base["max_model_len"])
        except (httpx.HTTPError, ValueError, KeyError, TypeError, StopIteration) as error:
            raise RescoreError(f"{self.result.engine} does not answer /v1/models as vLLM does: {error}") from error
        return *known, frozenset(str(model["id"]) for model in listed)

    def _loads_adapters(self) -> bool:
        """Whether the engine runs with LoRA; in doubt, yes."""
        if len(self._loaded) > 1:
            return True
        try:
            return "/v1/load_lora_adapter" in self._http.get("/openapi.json").json()["paths"]
        except (httpx.HTTPError, ValueError, KeyError):
            return True

    def _score(self, model: str, ids: IntArray, start: int) -> FloatArray:
        """Log-probs of `ids[start:]`."""
        if self._one_by_one:
            with ThreadPoolExecutor(AT_ONCE) as pool:
                scores = list(pool.map(lambda at: self._score_one(model, ids, at), range(start, len(ids))))
            return np.asarray(scores, dtype=np.float32)
        body = {"model": model, "prompt": ids.tolist(), "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        listed = self._post("/v1/completions", body)["prompt_logprobs"]
        return np.asarray([listed[i][str(int(ids[i]))]["logprob"] for i in range(start, len(ids))], dtype=np.float32)

    def _score_one(self, model: str, ids: IntArray, at: int) -> float:
        """Log-prob of `ids[at]` after the ids before it."""
        token = int(ids[at])
        # Twice, because vLLM returns as many entries as ids are asked for, and the token it samples here comes first.
        sampling = {"max_tokens": 1, "temperature": 1.0, "logprobs": 2, "logprob_token_ids": [token, token]}
        body = {"model": model, "token_ids": ids[:at].tolist(), "sampling_params": sampling}
        answer = self._post("/inference/v1/generate", body)
        for listed in answer["logprobs"]["content"][0]["top_logprobs"]:
            if token_id_of(listed) == token:
                return float(listed["logprob"])
        raise RescoreError(
            f"{self.result.engine} does not score tokens it is given (logprob_token_ids); use a vLLM without "
            "--enable-lora to rescore turns of the base model, or a newer one"
        )

    def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The first choice of the answer."""
        try:
            answer = self._http.post(path, json=body)
            answer.raise_for_status()
            choice: dict[str, Any] = answer.json()["choices"][0]
        except httpx.HTTPStatusError as error:
            text = error.response.text[:300]
            raise RescoreError(f"{self.result.engine}{path}: HTTP {error.response.status_code}: {text}") from error
        except (httpx.HTTPError, ValueError, KeyError) as error:
            raise RescoreError(f"{self.result.engine}{path} did not answer as vLLM does: {error}") from error
        return choice


def choose(turns: Iterable[tuple[str, str]], count: int, seed: int) -> list[tuple[str, str]]:
    """`count` of (rollout, turn) pairs, the same ones for the same seed; sorted, so a rollout is read once."""
    listed = sorted(turns)
    return sorted(random.Random(seed).sample(listed, min(count, len(listed))))
