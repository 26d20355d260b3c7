"""The engine behind a target, as tests steer it: scripted here, or a real vLLM that is made to say what a test wants.

Both count the assistant turns of a prompt to know which answer is due, so a repeated request gets the same text again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import httpx
from tokenizers import Tokenizer

from tests.conformance.relay import Relay
from tests.fake_engine.runner import FakeEngine
from tests.fake_engine.script import Script, answer_text
from tests.fake_engine.settings import FakeSettings

HEADER = "<|im_start|>assistant"
END = "<|im_end|>"
CONTEXT_TOKENS = 16_384
SLOW_TOKENS_PER_S = 60.0


class Engine(Protocol):
    """What tests need of the engine. `relay` is what the target was given as its engine's address."""

    name: str
    model: str
    relay: Relay

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def says(self, answers: Any) -> None:
        """What the model says from now on: a list, one a turn, or lists by a word of the prompt; forgets what was
        asked. None: whatever it likes."""

    def slowly(self) -> None:
        """The next answers take their time, about as long as a real model's."""

    def running(self) -> int:
        """Generations it works on now."""

    def finished(self) -> int:
        """Generations that came to their end, so far."""

    def second(self) -> Relay:
        """Another way to the same engine, which looks like a second one."""

    def cached_tokens(self) -> int:
        """Prompt tokens that its prefix cache held, so far."""

    def adapter(self, folder: Path) -> Path:
        """A LoRA that it can load; `folder` is for whatever has to be written."""


class ScriptedEngine:
    """The shared fake engine."""

    name = "the tests' fake engine"
    model = "fake"

    def __init__(self, tokenizer: Path) -> None:
        self._fake = FakeEngine(tokenizer, ["Hello."], settings=FakeSettings(max_model_len=CONTEXT_TOKENS))
        self._stack = ExitStack()
        self.relay: Relay

    def __enter__(self) -> Self:
        self._stack.enter_context(self._fake)
        self.relay = self._stack.enter_context(Relay(self._fake.url))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def says(self, answers: Any) -> None:
        """See `Engine`; a script says something anyway."""
        self._fake.engine.settings = replace(self._fake.engine.settings, tokens_per_s=None)
        self._fake.engine.script = Script.of(answers or ["Hello."])
        self.relay.asked.clear()

    def slowly(self) -> None:
        """See `Engine`."""
        self._fake.engine.settings = replace(self._fake.engine.settings, tokens_per_s=SLOW_TOKENS_PER_S)

    def running(self) -> int:
        """See `Engine`."""
        return len(self._fake.engine.running)

    def finished(self) -> int:
        """See `Engine`."""
        return self._fake.engine.generations - self._fake.engine.aborted

    def second(self) -> Relay:
        """See `Engine`."""
        return self._stack.enter_context(Relay(self._fake.url))

    def cached_tokens(self) -> int:
        """The fake has no cache."""
        return 0

    def adapter(self, folder: Path) -> Path:
        """The fake looks for this file alone."""
        (folder / "adapter_config.json").write_text("{}")
        return folder


class RealEngine:
    """A vLLM server at `url` with the hermes and qwen3 parsers; a grammar of one answer makes it say what is wanted."""

    def __init__(self, url: str, tokenizer: Path) -> None:
        self._url = url
        version = httpx.get(f"{url}/version", trust_env=False).raise_for_status().json()["version"]
        self.name = f"vLLM {version}"
        self.model = next(
            one["id"] for one in httpx.get(f"{url}/v1/models", trust_env=False).json()["data"] if not one["parent"]
        )
        self._tokenizer = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
        self._answers: dict[str, list[str]] = {}
        blanks = (i for text, i in self._tokenizer.get_vocab().items() if text and not text.strip("ĠĊĉčĀ"))
        self._brief = {str(i): -100.0 for i in blanks} | {str(self._tokenizer.token_to_id(END)): 100.0}
        """Under a request's own grammar, a model of random weights would write white space and calls without end."""
        self._stack = ExitStack()
        self.relay: Relay

    def __enter__(self) -> Self:
        self.relay = self.second()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def says(self, answers: Any) -> None:
        """See `Engine`."""
        told = {"": answers} if isinstance(answers, list) else answers or {}
        self._answers = {marker: [answer_text(one) for one in said] for marker, said in told.items()}
        self.relay.asked.clear()

    def slowly(self) -> None:
        """A model on a CPU is slow enough."""

    def running(self) -> int:
        """See `Engine`."""
        return int(self._metric("vllm:num_requests_running") + self._metric("vllm:num_requests_waiting"))

    def finished(self) -> int:
        """See `Engine`."""
        return int(sum(self._metric("vllm:request_success_total", f'"{why}"') for why in ("stop", "length")))

    def second(self) -> Relay:
        """See `Engine`."""
        return self._stack.enter_context(Relay(self._url, self._forced))

    def cached_tokens(self) -> int:
        """See `Engine`."""
        return int(self._metric("vllm:prefix_cache_hits_total"))

    def adapter(self, folder: Path) -> Path:
        """See `Engine`; whoever started the server has one for its model."""
        return Path(os.environ["TURNGATE_CONFORMANCE_ADAPTER"])

    def _metric(self, name: str, label: str = "") -> float:
        lines = httpx.get(f"{self._url}/metrics", trust_env=False).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{") and label in line)

    def _forced(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The request with a grammar that leaves the model one answer; tool calls forced by the request stay so."""
        if path == "/v1/messages" or not self._answers:
            return body
        if body.get("tool_choice", "auto") not in ("auto", "none"):
            return {**body, "logit_bias": self._brief}
        if path == "/v1/chat/completions":
            text = json.dumps([body.get("messages"), body.get("tools")], ensure_ascii=False)
            turn = sum(message.get("role") == "assistant" for message in body["messages"])
            return {**body, **self._forcing(self._answer(text, turn))}
        if body["sampling_params"].get("structured_outputs"):
            return {**body, "sampling_params": {**body["sampling_params"], "logit_bias": self._brief}}
        text = self._tokenizer.decode(body["token_ids"], skip_special_tokens=False)
        wanted = self._forcing(self._answer(text, max(text.count(HEADER) - 1, 0)))
        return {**body, "sampling_params": {**body["sampling_params"], **wanted}}

    def _forcing(self, text: str) -> dict[str, Any]:
        """A grammar of one text, and a liking for the tokens a trained model would write it with: rendered again, the
        text gives the same tokens."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        liked = {str(one): float(min(10 * len(self._tokenizer.decode([one])), 100)) for one in ids}
        return {"structured_outputs": {"choice": [text]}, "logit_bias": liked}

    def _answer(self, text: str, turn: int) -> str:
        marker = next((one for one in self._answers if one and one in text), "")
        answers: Sequence[str] = self._answers.get(marker) or self._answers[""]
        return answers[min(turn, len(answers) - 1)]
