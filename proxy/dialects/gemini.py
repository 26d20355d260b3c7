"""Gemini's wire: generateContent, streamGenerateContent as events or as one JSON array, Google's error form.

Text goes out as it grows, a function call as one part once it is complete. Arguments are sent as they were sampled
wherever they are a JSON object; the echo of an answer must mean what was recorded (see `gemini_values`).
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import orjson

from turngate.proxy.ask import Answer, Ask, Usage
from turngate.proxy.call_names import CallNames
from turngate.proxy.dialects import gemini_ask
from turngate.proxy.dialects.gemini_values import wire_arguments
from turngate.proxy.errors import GatewayRefusal

Form = Literal["whole", "events", "array"]

FINISH = {"stop": "STOP", "tool_calls": "STOP", "length": "MAX_TOKENS", "content_filter": "SAFETY"}
STATUS = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    409: "ABORTED",
    410: "FAILED_PRECONDITION",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    507: "RESOURCE_EXHAUSTED",
}
_REASONING = ("reasoning", "reasoning_content")


@dataclass(frozen=True, slots=True)
class Gemini:
    """See `turngate.proxy.dialects.base.Dialect`. The path and its query say which form the answer has."""

    form: Form = "whole"
    name: str = "gemini"

    def parse(self, raw: bytes, *, training: bool, path: Mapping[str, str]) -> Ask:
        """The ask in a request body; the model is the path's."""
        ask = gemini_ask.parse(raw, path["model"].removeprefix("models/"), training=training)
        if self.form == "array":
            ask = replace(ask, stream_type=b"application/json; charset=utf-8")
        return replace(ask, stream=self.form != "whole")

    def completion(self, turn_id: str, model: str, created_s: int, ask: Ask, answer: Answer) -> dict[str, Any]:
        """The body of a whole answer."""
        parts = Parts(turn_id, ask)
        said = parts.take(answer.message) + parts.rest(answer.message)
        return _response(turn_id, model, said or [{"text": ""}], answer)

    def events(self, turn_id: str, model: str, created_s: int, ask: Ask) -> Events:
        """The events of a streamed answer."""
        return Events(turn_id, model, ask, array=self.form == "array")

    def refusal(self, refusal: GatewayRefusal) -> dict[str, Any]:
        """Google's error object; `details` has the gateway's own code."""
        status = STATUS.get(refusal.status, "UNAVAILABLE" if refusal.status >= 500 else "INVALID_ARGUMENT")
        about = {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": refusal.code, "domain": "turngate"}
        return {"error": {"code": refusal.status, "message": str(refusal), "status": status, "details": [about]}}


class Events:
    """The stream events of one answer: one GenerateContentResponse each."""

    def __init__(self, turn_id: str, model: str, ask: Ask, *, array: bool) -> None:
        self._turn_id = turn_id
        self._model = model
        self._array = array
        self._parts = Parts(turn_id, ask)
        self._began = False

    def keepalive(self) -> bytes:
        """An empty line, which is nothing in both forms; Google's Python SDK takes a comment for broken JSON."""
        return b"\r\n"

    def start(self, prompt_tokens: int | None) -> None:
        """Usage stands at the end here."""

    def delta(self, delta: Mapping[str, Any]) -> bytes:
        """The parts that are complete now: text at once, a call when the next one begins."""
        parts = self._parts.take(delta)
        return self._event(_response(self._turn_id, self._model, parts)) if parts else b""

    def end(self, answer: Answer) -> bytes:
        """The calls not sent yet, the finish reason and the usage."""
        parts = self._parts.rest(answer.message) or [{"text": ""}]
        last = self._event(_response(self._turn_id, self._model, parts, answer))
        return last + b"]" if self._array else last

    def error(self, refusal: GatewayRefusal) -> bytes:
        """A fault after the first byte: an error object, no finish reason."""
        last = self._event(Gemini().refusal(refusal))
        return last + b"]" if self._array else last

    def _event(self, body: Mapping[str, Any]) -> bytes:
        data = orjson.dumps(body)
        if not self._array:
            return b"data: " + data + b"\r\n\r\n"
        began, self._began = self._began, True
        return (b",\r\n" if began else b"[") + data


class Parts:
    """An assistant message in chat form as parts, piece by piece: `take` deltas, then `rest` of the whole message."""

    def __init__(self, turn_id: str, ask: Ask) -> None:
        self._signature = base64.b64encode(turn_id.encode()).decode()
        self._thoughts = bool(ask.about.get("thoughts"))
        self._names = CallNames(ask.calls_before)
        self._calls: list[dict[str, str]] = []
        self._sent = 0

    def take(self, delta: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The parts that a delta completes; of a whole message, all but its last call."""
        parts: list[dict[str, Any]] = []
        for key in _REASONING:
            if delta.get(key) and self._thoughts:
                parts.append({"text": delta[key], "thought": True, "thoughtSignature": self._signature})
        if delta.get("content"):
            parts.append({"text": delta["content"]})
        for i, entry in enumerate(delta.get("tool_calls") or ()):
            index, function = entry.get("index", i), entry.get("function") or {}
            while len(self._calls) <= index:
                parts += [self._next() for _ in range(len(self._calls) - self._sent)]
                self._calls.append({"name": "", "arguments": ""})
            self._calls[index]["name"] += function.get("name") or ""
            self._calls[index]["arguments"] += function.get("arguments") or ""
        return parts

    def rest(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The calls of the whole message that were not sent yet."""
        whole = [call["function"] for call in message.get("tool_calls") or ()]
        self._calls[self._sent :] = [
            {"name": function["name"], "arguments": function["arguments"]} for function in whole[self._sent :]
        ]
        return [self._next() for _ in range(len(self._calls) - self._sent)]

    def _next(self) -> dict[str, Any]:
        call = self._calls[self._sent]
        self._sent += 1
        name, arguments = call["name"], call["arguments"]
        said = {"id": self._names.name(name, arguments), "name": name, "args": wire_arguments(arguments)}
        part: dict[str, Any] = {"functionCall": said}
        if self._sent == 1:
            part["thoughtSignature"] = self._signature
        return part


def model_card(policy: str, window_tokens: int | None) -> dict[str, Any]:
    """A model as Google's lists describe it."""
    return {
        "name": f"models/{policy}",
        "version": "1",
        "displayName": policy,
        "inputTokenLimit": window_tokens,
        "outputTokenLimit": window_tokens,
        "supportedGenerationMethods": ["generateContent", "streamGenerateContent", "countTokens"],
    }


def _response(turn_id: str, model: str, parts: list[dict[str, Any]], answer: Answer | None = None) -> dict[str, Any]:
    candidate: dict[str, Any] = {"content": {"role": "model", "parts": parts}, "index": 0}
    body: dict[str, Any] = {"candidates": [candidate], "modelVersion": model, "responseId": turn_id}
    if answer is not None:
        candidate["finishReason"] = FINISH.get(answer.finish_reason, "OTHER")
        body["usageMetadata"] = _usage(answer.usage)
    return body


def _usage(usage: Usage) -> dict[str, int]:
    return {
        "promptTokenCount": usage.prompt_tokens,
        "candidatesTokenCount": usage.completion_tokens,
        "totalTokenCount": usage.prompt_tokens + usage.completion_tokens,
    }
