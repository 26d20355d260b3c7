"""Transparent turns: for engines without render, generate and derender, on plain chat completions.

The engine templates and parses; the gateway keeps the token ids and log-probs it reports. History is then re-rendered
by the engine each turn, so a turn continues the tree only where the tokens really agree, and every break is counted.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import numpy as np

from turngate.proxy.ask import Ask
from turngate.proxy.engine.errors import ContextOverflow, EngineFault, EngineRefused
from turngate.proxy.engine.failover import SessionEngines
from turngate.proxy.engine.types import Chunk
from turngate.proxy.engine.wire import clean_delta, finite
from turngate.proxy.sampled import Sampled
from turngate.proxy.sampling import Sampling
from turngate.proxy.turns import IntArray

RERENDERED = "rerendered"
"""Break cause: the engine's own rendering of the history differs from the tokens that were sampled."""


class TransparentAnswer:
    """One answer through `/v1/chat/completions`. After `deltas()` ends, `prompt_ids` and `message()` are final."""

    prompt_ids: IntArray

    def __init__(self, engines: SessionEngines, model: str, ask: Ask, sampling: Sampling, max_model_len: int) -> None:
        self._engines = engines
        self._body = _body(model, ask, sampling, max_model_len)
        self._asked_tokens = min(
            (ask.asked[key] for key in ("max_tokens", "max_completion_tokens") if key in ask.asked), default=None
        )
        self._texts: dict[str, str] = {}
        self._calls: dict[int, dict[str, Any]] = {}
        self.finish_reason = "stop"

    async def deltas(self, sampled: Sampled) -> AsyncGenerator[Mapping[str, Any], None]:
        """The engine's own deltas, cleaned; tokens go into `sampled`.

        Raises:
            EngineError: as `SessionEngines.chat_stream`.
        """
        try:
            async for delta in self._once(sampled):
                yield delta
        except EngineRefused as error:
            if isinstance(error, ContextOverflow) or "max_tokens" not in self._body or sampled.ids:
                raise
            del self._body["max_tokens"]  # more than fits was asked for: the engine then takes what fits
            async for delta in self._once(sampled):
                yield delta
        if not hasattr(self, "prompt_ids"):
            raise EngineFault("the engine reported no prompt ids: it must know return_token_ids (vLLM 0.11 or later)")
        if len(sampled.ids) != len(sampled.logprobs):
            raise EngineFault(f"the engine reported {len(sampled.ids)} ids but {len(sampled.logprobs)} log-probs")

    def message(self) -> dict[str, Any]:
        """The assistant message."""
        content = self._texts.get("content", "")
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not self._calls else None}
        message |= {part: text for part, text in self._texts.items() if part != "content"}
        if self._calls:
            message["tool_calls"] = [call for _, call in sorted(self._calls.items())]
        return message

    async def _once(self, sampled: Sampled) -> AsyncGenerator[Mapping[str, Any], None]:
        async with aclosing(self._engines.chat_stream(self._body)) as chunks:
            async for chunk in chunks:
                if chunk.get("prompt_token_ids"):
                    self.prompt_ids = np.asarray(chunk["prompt_token_ids"], dtype=np.int32)
                for choice in chunk.get("choices") or ():
                    delta = self._take(choice, sampled)
                    if delta:
                        yield delta

    def _take(self, choice: Mapping[str, Any], sampled: Sampled) -> dict[str, Any]:
        entries = (choice.get("logprobs") or {}).get("content") or ()
        reason = choice.get("finish_reason")
        sampled.take(
            Chunk(
                ids=tuple(choice.get("token_ids") or ()),
                logprobs=tuple(finite(entry.get("logprob")) for entry in entries),
                top=None,
                finish_reason={"tool_calls": "stop"}.get(reason, reason) if reason else None,
                stop_reason=choice.get("stop_reason"),
            )
        )
        if reason:
            self.finish_reason = reason
        delta = clean_delta(choice.get("delta"))
        for part in ("content", "reasoning", "reasoning_content"):
            if part in delta:
                self._texts[part] = self._texts.get(part, "") + delta[part]
        for entry in delta.get("tool_calls", ()):
            self._add_call(entry)
        return delta

    def _add_call(self, entry: Mapping[str, Any]) -> None:
        call = self._calls.setdefault(
            entry["index"], {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
        )
        call["id"] = call["id"] or entry.get("id", "")
        for key in ("name", "arguments"):
            call["function"][key] += entry.get("function", {}).get(key) or ""


def _body(model: str, ask: Ask, sampling: Sampling, max_model_len: int) -> dict[str, Any]:
    body: dict[str, Any] = {**ask.render_body, "model": model, "messages": list(ask.messages)}
    if ask.tools:
        body["tools"] = list(ask.tools)
    else:
        body.pop("tool_choice", None)
        body.pop("parallel_tool_calls", None)
    body |= {key: value for key, value in sampling.params.items() if key != "n"}
    if sampling.params["max_tokens"] >= max_model_len:
        body.pop("max_tokens")
    return body
