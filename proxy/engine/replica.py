"""One vLLM server: render, generate, derender, chat, adapters, health.

Thin on purpose: a method an endpoint, values in and out. It never decides what to do about an error, never retries a
generation and never looks into token ids.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer

from turngate.proxy.engine.errors import EngineError, EngineFault, EngineRefused
from turngate.proxy.engine.http import EngineHttp
from turngate.proxy.engine.probe import probe_engine
from turngate.proxy.engine.text_ahead import TextAhead
from turngate.proxy.engine.types import Capabilities, Chunk, EngineLoad, GenerateCall, Rendered
from turngate.proxy.engine.whole_derender import WholeDerender, parse_whole
from turngate.proxy.engine.wire import (
    Delta,
    State,
    generate_body,
    parse_chunk,
    parse_derendered,
    parse_load,
    parse_rendered,
    quick_chunk,
    render_body,
)
from turngate.proxy.turns import IntArray

_ENDED = frozenset({"stop", "length"})
_ADAPTER_TIMEOUT_S = 120.0
_BEFORE_TOKENS = 4
_HEALTH_TIMEOUT_S = 5.0

Health = Literal["up", "late", "down"]

Derender = Callable[[Sequence[int], str | None, State | None], Awaitable[tuple[Delta, State]]]
"""`(new ids, finish reason, state of the call before) -> (delta, state)`; what an `AnswerStream` calls."""


class Replica:
    """A vLLM server at `url`; `render_url`, when given, serves render and derender (`vllm launch render`)."""

    def __init__(self, name: str, url: str, http: EngineHttp, render_url: str | None = None) -> None:
        self.name = name
        self.url = url.rstrip("/")
        self.render_url = (render_url or url).rstrip("/")
        self.capabilities: Capabilities | None = None
        self.in_flight = 0
        self.markers: frozenset[int] | None = None
        self.tokenizer: Tokenizer | None = None
        self._http = http

    async def probe(self) -> Capabilities:
        """Find out what the engine can do; kept in `capabilities`. Takes a handful of small calls."""
        self.capabilities = await probe_engine(self._http, self.url, self.render_url)
        return self.capabilities

    async def render(self, body: Mapping[str, Any]) -> Rendered:
        """Prompt ids and resolved sampling parameters of a chat-completions request.

        `stream`, `n`, log-prob options and nulls are left out; a token limit above the context becomes what fits.

        Raises:
            EngineRefused, ContextOverflow, EngineUnavailable
        """
        limit = self.capabilities.max_model_len if self.capabilities else None
        url = f"{self.render_url}/v1/chat/completions/render"
        if "model" in body:
            body = {**body, "model": self._rendered_as(body["model"])}
        return parse_rendered(await self._http.post(url, render_body(body, limit), pure=True))

    async def generate(self, call: GenerateCall) -> AsyncGenerator[Chunk, None]:
        """Sample; the last chunk has a finish reason. Closing this generator aborts the generation in the engine.

        Raises:
            EngineRefused, ContextOverflow, EngineUnavailable: before the first chunk.
            EngineFault: the stream broke, or ended without `stop` or `length`.
        """
        url = f"{self.url}/inference/v1/generate"
        ended = False
        self.in_flight += 1
        try:
            quick = _not_quick if call.top_logprobs else quick_chunk
            async with aclosing(self._http.events(url, generate_body(call, stream=True), quick)) as events:
                async for event in events:
                    if ended:
                        continue
                    chunk = event if isinstance(event, Chunk) else parse_chunk(event, call.top_logprobs)
                    if chunk is None:
                        continue
                    if chunk.finish_reason is not None and chunk.finish_reason not in _ENDED:
                        raise EngineFault(f"the engine at {self.url} ended the stream with {chunk.finish_reason!r}")
                    ended = chunk.finish_reason is not None
                    yield chunk
        except EngineFault:
            if not ended:
                raise
        finally:
            self.in_flight -= 1
        if not ended:
            raise EngineFault(f"the stream from {self.url} ended without a finish reason")

    async def abort(self, request_id: str) -> None:
        """Stop a generation by its `GenerateCall.request_id`; no error when it is over already."""
        await self._http.post(
            f"{self.url}/inference/v1/abort_requests", {"request_ids": [f"generate-tokens-{request_id}"]}, timeout_s=10
        )

    async def derender(
        self,
        model: str,
        request_id: str,
        ids: Sequence[int],
        finish_reason: str | None,
        state: State | None,
        chat_request: Mapping[str, Any],
        prompt_ids: IntArray,
    ) -> tuple[Delta, State]:
        """Text of the next `ids` as a cleaned delta, and the state to pass with the call after.

        Args:
            ids: new output ids, without the stop token.
            chat_request: from `wire.derender_request`.
            prompt_ids: int32[P]; cut to what the engine needs.

        Raises:
            EngineRefused, EngineUnavailable, EngineFault
        """
        model = self._rendered_as(model)
        tail = self.capabilities.derender_tail_tokens if self.capabilities else None
        choice = {"index": 0, "token_ids": list(ids), "finish_reason": finish_reason, "stop_reason": None}
        body = {
            "stream": True,
            "model": model,
            "generate_chunk": {"request_id": request_id, "choices": [choice]},
            "stream_state": state,
            "chat_request": {"model": model, **chat_request},
            "prompt_token_ids": np.ascontiguousarray(prompt_ids if tail is None else prompt_ids[-tail:]),
        }
        url = f"{self.render_url}/v1/chat/completions/derender"
        return parse_derendered(await self._http.post(url, body, pure=True))

    def derenderer(
        self, model: str, request_id: str, chat_request: Mapping[str, Any], prompt_ids: IntArray
    ) -> Derender:
        """`derender` with everything but the tokens filled in, for one answer."""

        async def call(ids: Sequence[int], finish: str | None, state: State | None) -> tuple[Delta, State]:
            return await self.derender(model, request_id, ids, finish, state, chat_request, prompt_ids)

        async def whole(ids: Sequence[int], parsed: bool) -> Mapping[str, Any]:
            response = {"request_id": request_id, "choices": [{"index": 0, "token_ids": list(ids)}]}
            there = self._rendered_as(model)
            body: dict[str, Any] = {"model": there, "generate_response": response}
            if parsed:
                body["chat_request"] = {"model": there, **chat_request}
            return parse_whole(
                await self._http.post(f"{self.render_url}/v1/chat/completions/derender", body, pure=True)
            )

        if self.capabilities is not None and not self.capabilities.derender_streams:
            return WholeDerender(whole, self.markers)
        return call

    def _rendered_as(self, model: str) -> str:
        """The name for a render server of its own: it knows the base alone, whose template its adapters share."""
        return model if self.render_url == self.url or self.capabilities is None else self.capabilities.model

    def text_ahead(self, prompt_ids: IntArray) -> TextAhead | None:
        """Plain text without derender for one answer; None where this engine's text cannot be known without it."""
        known = self.capabilities is not None and self.capabilities.plain_until_marked
        if not known or self.tokenizer is None or self.markers is None:
            return None
        return TextAhead(self.tokenizer, self.markers, prompt_ids[-_BEFORE_TOKENS:].tolist())

    async def chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """A whole chat completion with token ids and log-probs (transparent mode): vLLM's answer as it is."""
        self.in_flight += 1
        try:
            answer = await self._http.post(f"{self.url}/v1/chat/completions", _chat_body(body, stream=False))
        finally:
            self.in_flight -= 1
        if not isinstance(answer, dict):
            raise EngineFault(f"the engine at {self.url} answered {answer!r:.200} to a chat completion")
        return answer

    async def chat_stream(self, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Chunks of a streamed chat completion with token ids, log-probs and usage: vLLM's objects as they are.

        Raises:
            EngineRefused, ContextOverflow, EngineUnavailable: before the first chunk.
            EngineFault: the stream broke, or ended without a finish reason.
        """
        ended = False
        self.in_flight += 1
        try:
            async with aclosing(
                self._http.events(f"{self.url}/v1/chat/completions", _chat_body(body, stream=True))
            ) as events:
                async for event in events:
                    ended = ended or any(choice.get("finish_reason") for choice in event.get("choices") or ())
                    yield event
        finally:
            self.in_flight -= 1
        if not ended:
            raise EngineFault(f"the stream from {self.url} ended without a finish reason")

    async def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA folder under `name`; loaded already is fine.

        Raises:
            EngineRefused: the folder does not suit the engine, or runtime adapters are off; the message says which.
        """
        body = {"lora_name": name, "lora_path": path}
        try:
            await self._http.post(f"{self.url}/v1/load_lora_adapter", body, timeout_s=_ADAPTER_TIMEOUT_S)
        except EngineRefused as error:
            if "already" in error.message:
                return
            raise self._adapter_error(error, f"load adapter {name} from {path}") from error

    async def unload_adapter(self, name: str) -> None:
        """Forget `name`; turns in flight go on. Not loaded is fine. Raises EngineRefused like `load_adapter`."""
        try:
            await self._http.post(
                f"{self.url}/v1/unload_lora_adapter", {"lora_name": name}, timeout_s=_ADAPTER_TIMEOUT_S
            )
        except EngineRefused as error:
            if error.status == 404 and name in error.message:
                return
            raise self._adapter_error(error, f"unload adapter {name}") from error

    async def models(self) -> list[str]:
        """Names that can be asked for: the model and its loaded adapters."""
        listed = await self._http.get(f"{self.url}/v1/models")
        return [str(one["id"]) for one in listed["data"]]

    async def health(self) -> Health:
        """Whether the engine (and its render server) answers /health with 200, or does not in time."""
        try:
            async with asyncio.timeout(_HEALTH_TIMEOUT_S):
                for url in {self.url, self.render_url}:
                    await self._http.get_text(f"{url}/health", timeout_s=2 * _HEALTH_TIMEOUT_S)
        except TimeoutError:
            return "late"
        except EngineError:
            return "down"
        return "up"

    async def load(self) -> EngineLoad:
        """Running and waiting requests and KV usage, from `/metrics`."""
        return parse_load(await self._http.get_text(f"{self.url}/metrics"))

    def _adapter_error(self, error: EngineRefused, what: str) -> EngineRefused:
        message = f"the engine at {self.url} would not {what}: {error.message}"
        if error.status == 404 and error.message == "Not Found":
            message = (
                f"the engine at {self.url} cannot {what}: it has no runtime adapters; start it with --enable-lora and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
            )
        return EngineRefused(error.status, message, error.code)


def _not_quick(data: bytes) -> Chunk | None:
    return None


def _chat_body(body: Mapping[str, Any], *, stream: bool) -> dict[str, Any]:
    out = {key: value for key, value in body.items() if value is not None}
    out.pop("stream_options", None)
    out |= {"stream": stream, "return_token_ids": True, "logprobs": True}
    if stream:
        out["stream_options"] = {"include_usage": True}
    return out
