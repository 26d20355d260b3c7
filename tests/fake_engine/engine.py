"""The fake engine's state and generations: who runs, who was aborted, what goes wrong next.

One instance lives in one event loop. It knows values only; `app.py` puts it on the wire.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Any

from tests.fake_engine.policy import Completion, complete, logprob_content
from tests.fake_engine.script import Script
from tests.fake_engine.settings import FakeSettings, Fault
from tests.fake_engine.tokens import Tokens

_HEADER = "<|im_start|>assistant\n"


class WireError(Exception):
    """Answered as vLLM's error body."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError") -> None:
        super().__init__(message)
        self.status, self.message, self.kind = status, message, kind


class Dropped(Exception):
    """Raised inside a response so that the server breaks the connection."""


@dataclass(frozen=True)
class Piece:
    """Some tokens of a running generation, from output position `start` on; the last has a finish reason."""

    ids: list[int]
    start: int
    finish_reason: str | None
    stop_reason: int | str | None
    error: str | None = None


class Engine:
    """State of one fake engine. Counters are plain attributes for tests to read."""

    def __init__(self, tokens: Tokens, script: Script, settings: FakeSettings) -> None:
        self.tokens, self.script, self.settings = tokens, script, settings
        self.adapters: dict[str, str] = {}
        self.most_adapters = 0
        self.fault: Fault | None = None
        self.running: dict[str, asyncio.Event] = {}
        self.generations = 0
        self.waiting = 0
        self.kv_usage = 0.0
        self._draw = random.Random(0)
        self.aborted = 0
        self.took_s: dict[str, float] = {}
        self.intervals: Counter[int] = Counter()
        self.requests: deque[tuple[str, Any]] = deque(maxlen=settings.keep_requests)

    def check_model(self, name: str | None) -> str:
        """The model to use. Raises WireError 404 for a name that is neither the base nor a loaded adapter."""
        if name is None or name == self.settings.model or name in self.adapters:
            return name or self.settings.model
        aliases = ", ".join([self.settings.model, *self.adapters])
        raise WireError(404, f"The model `{name}` does not exist. Valid aliases: {aliases}.", "NotFoundError")

    def check_room(self, prompt_tokens: int) -> int:
        """Tokens left for the answer. Raises WireError 400 in vLLM's words when there are none."""
        limit = self.settings.max_model_len
        if prompt_tokens >= limit:
            raise WireError(
                400,
                f"The decoder prompt (length {prompt_tokens}) is longer than the maximum model length of {limit}. "
                "Make sure that `max_model_len` is no smaller than the number of text tokens.",
            )
        return limit - prompt_tokens

    def complete(self, prompt: list[int], params: dict[str, Any]) -> Completion:
        """The whole answer to a prompt; a prompt that ends inside an answer is continued."""
        room = self.check_room(len(prompt))
        if self.settings.draws:
            return complete(self.tokens, self._drawn(params, room), params, room)
        if not self.script.answers:
            return complete(self.tokens, self._ids(self.script.filler(prompt)), params, room)
        text = self.tokens.decode(prompt)
        answer = self.script.answer(text)
        ids, begun = self._ids(answer), self._after_header(prompt)
        if begun == ids[: len(begun)]:
            return complete(self.tokens, ids[len(begun) :] or ids[-1:], params, room)
        said = text.rpartition(_HEADER)[2]
        rest = answer[len(said) :] if answer.startswith(said) else answer
        return complete(self.tokens, self._ids(rest), params, room)

    def _ids(self, text: str) -> list[int]:
        return [*self.tokens.encode(text), self.tokens.eos_id]

    def _after_header(self, prompt: list[int]) -> list[int]:
        """The tokens after the last assistant header: the beginning of an answer that is to be gone on with."""
        header = self.tokens.encode(_HEADER)
        for at in range(len(prompt) - len(header), -1, -1):
            if prompt[at : at + len(header)] == header:
                return prompt[at + len(header) :]
        return []

    def _drawn(self, params: dict[str, Any], room: int) -> list[int]:
        seed = params.get("seed")
        draw = self._draw if seed is None else random.Random(seed)
        pool = self.tokens.encode("".join(chr(ord("A") + i) + " " for i in range(self.settings.draws)))[::2]
        return [draw.choice(pool) for _ in range(min(params.get("max_tokens") or room, room))]

    def logprobs(self, piece: Piece, prompt_tokens: int, model: str, params: dict[str, Any]) -> dict[str, Any] | None:
        """vLLM's `logprobs` of a piece, None when not asked for."""
        k = params.get("logprobs")
        if k is None:
            return None
        temperature = 1.0 if self.settings.raw_logprobs else float(params.get("temperature", 1.0)) or 1.0
        vocab = self.tokens.vocab_tokens
        start = prompt_tokens + piece.start
        wanted = params.get("logprob_token_ids") or ()
        return {"content": logprob_content(piece.ids, start, model, temperature, k, vocab, wanted)}

    async def pieces(
        self,
        request_id: str,
        answer: Completion,
        params: dict[str, Any],
        *,
        whole: bool = False,
        begun_s: float | None = None,
    ) -> AsyncGenerator[Piece, None]:
        """The answer at the engine's own pace, `whole`: in one piece. Closing the generator counts as an abort.

        The time that is kept is from now on, or from `begun_s` on (monotonic).
        """
        fault = self._take_fault()
        if fault is not None and fault.kind == "refuse":
            raise WireError(500, "the engine was told to refuse", "InternalServerError")
        stopped = self.running.setdefault(request_id, asyncio.Event())
        self.generations += 1
        finished = False
        started_s = time.monotonic()
        step = self._step(params, whole)
        try:
            at = 0
            while at < len(answer.ids):
                end = min(at + (step if at or (whole and fault is None) else 1), len(answer.ids))
                await self._wait(started_s, end, stopped)
                if fault is not None and end > fault.after_tokens:
                    if fault.kind == "error":
                        finished = True
                        yield Piece([], at, None, None, "EngineCore encountered an issue. See stack trace for details.")
                        return
                    if fault.kind == "cut":
                        finished = True
                        return
                    await self._fail(fault)
                    stopped.set()
                if stopped.is_set():
                    yield Piece([], at, "abort", None)
                    return
                last = end == len(answer.ids)
                finished = last
                reasons = (answer.finish_reason, answer.stop_reason) if last else (None, None)
                yield Piece(answer.ids[at:end], at, *reasons)
                at = end
        finally:
            self.running.pop(request_id, None)
            if self.settings.keep_times:
                self.took_s[request_id] = time.monotonic() - (started_s if begun_s is None else begun_s)
            self.aborted += not finished

    def _step(self, params: dict[str, Any], whole: bool) -> int:
        """Tokens an event."""
        asked = (params.get("stream_interval") or 1) if self.settings.intervals else 1
        step: int = max(self.settings.chunk_tokens, asked)
        if self.settings.keep_times and not whole:
            self.intervals[step] += 1
        return 1 << 30 if whole else step

    async def _wait(self, begun_s: float, tokens: int, stopped: asyncio.Event) -> None:
        rate = self.settings.tokens_per_s
        due_s = begun_s + self.settings.latency_first_s + ((tokens - 1) / rate if rate else 0.0)
        left_s = due_s - time.monotonic()
        if left_s <= 0:
            await asyncio.sleep(0)
            return
        try:
            await asyncio.wait_for(stopped.wait(), left_s)
        except TimeoutError:
            return

    async def _fail(self, fault: Fault) -> None:
        if fault.kind == "drop":
            raise Dropped
        if fault.kind == "stall":
            await asyncio.Event().wait()

    def _take_fault(self) -> Fault | None:
        fault = self.fault
        if fault is not None and fault.times > 0:
            self.fault = replace(fault, times=fault.times - 1) if fault.times > 1 else None
        return fault
