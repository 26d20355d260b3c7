"""Anthropic Messages, the way out: an assistant message in chat form as content blocks, whole or as stream events.

Text and thoughts stream as they are sampled. The input of a tool call is sent when the call is complete, because only
then it is known to be JSON, and clients fail on an input that is not. Nothing may be said that is not in the record.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import orjson

from turngate.proxy.ask import Answer, Ask, Usage
from turngate.proxy.dialects.messages_json import input_json
from turngate.proxy.errors import GatewayRefusal

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_THOUGHTS = ("reasoning", "reasoning_content")


def error_body(refusal: GatewayRefusal) -> dict[str, Any]:
    """Anthropic's error object; `code` is ours, and stable."""
    kind = ERROR_TYPES.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "api_error")
    return {
        "type": "error",
        "error": {"type": kind, "message": str(refusal), "param": refusal.param, "code": refusal.code},
    }


def signature(turn_id: str) -> str:
    """What stands for a thought's signature: opaque, the same whenever the turn is told again, read by nobody."""
    return base64.b64encode(blake2b(turn_id.encode(), digest_size=48, person=b"turngate").digest()).decode()


def message_body(turn_id: str, model: str, content: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
    """A message without its end."""
    return {
        "id": f"msg_{turn_id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def content_blocks(turn_id: str, message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The blocks of a whole answer: thought, text, calls. An answer of nothing is one empty text."""
    blocks: list[dict[str, Any]] = []
    for name in _THOUGHTS:
        if message.get(name):
            blocks.append({"type": "thinking", "thinking": message[name], "signature": signature(turn_id)})
    text, calls = message.get("content") or "", message.get("tool_calls") or ()
    if text.strip() or not (blocks or calls):
        blocks.append({"type": "text", "text": text})
    for call in calls:
        said = orjson.Fragment(input_json(call["function"]["arguments"]))
        blocks.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": said})
    return blocks


def ending(ask: Ask, answer: Answer) -> dict[str, str | None]:
    """`stop_reason` and `stop_sequence`; a stop string that the agent did not ask for ends its turn like any other."""
    if answer.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if answer.message.get("tool_calls"):
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if answer.stop is not None and answer.stop in ask.about.get("stop_sequences", ()):
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def usage_of(usage: Usage) -> dict[str, int]:
    """Anthropic's usage object; what an engine has cached is not told apart."""
    cache = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": usage.prompt_tokens, **cache, "output_tokens": usage.completion_tokens}


class Events:
    """The stream events of one answer."""

    def __init__(self, turn_id: str, model: str, ask: Ask) -> None:
        self._turn_id, self._model, self._ask = turn_id, model, ask
        self._prompt_tokens = 0
        self._begun = False
        self._open: str | None = None
        self._index = -1
        self._blank = ""
        self._call: int | None = None
        self._arguments = ""

    def keepalive(self) -> bytes:
        """The API's own sign of life."""
        return _event("ping", {})

    def start(self, prompt_tokens: int | None) -> None:
        """The usage of `message_start`."""
        self._prompt_tokens = prompt_tokens or 0

    def delta(self, delta: Mapping[str, Any]) -> bytes:
        """A piece of the message."""
        out = self._begin()
        for name in _THOUGHTS:
            if delta.get(name):
                out += self._piece("thinking", delta[name])
        if delta.get("content"):
            out += self._piece("text", delta["content"])
        for entry in delta.get("tool_calls") or ():
            out += self._tool(entry)
        return out

    def end(self, answer: Answer) -> bytes:
        """The last block's end, why the answer ended, and the usage."""
        out = self._begin() + self._close()
        if self._index < 0:
            out += self._block("text", {"text": ""})
            out += self._delta({"type": "text_delta", "text": self._blank}) if self._blank else b""
            out += self._close()
        out += _event("message_delta", {"delta": ending(self._ask, answer), "usage": usage_of(answer.usage)})
        return out + _event("message_stop", {})

    def error(self, refusal: GatewayRefusal) -> bytes:
        """A fault after the first byte."""
        return _event("error", error_body(refusal))

    def _begin(self) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        body = message_body(self._turn_id, self._model, [], usage_of(Usage(self._prompt_tokens, 1)))
        return _event("message_start", {"message": body})

    def _piece(self, kind: str, text: str) -> bytes:
        """A piece of text or thought. A text block never begins blank: the API's clients drop blocks that are."""
        out = b""
        if self._open != kind:
            if kind == "text":
                text, self._blank = self._blank + text, ""
                if not text.strip():
                    self._blank = text
                    return b""
            out = self._close() + self._block(kind, {kind: "", **({"signature": ""} if kind == "thinking" else {})})
        return out + self._delta({"type": f"{kind}_delta", kind: text})

    def _tool(self, entry: Mapping[str, Any]) -> bytes:
        out, function = b"", entry.get("function") or {}
        if self._open != "tool_use" or self._call != entry["index"]:
            out = self._close()
            self._call = entry["index"]
            out += self._block("tool_use", {"id": entry.get("id", ""), "name": function.get("name", ""), "input": {}})
        self._arguments += function.get("arguments") or ""
        return out

    def _block(self, kind: str, rest: Mapping[str, Any]) -> bytes:
        self._index += 1
        self._open = kind
        return _event("content_block_start", {"index": self._index, "content_block": {"type": kind, **rest}})

    def _delta(self, delta: Mapping[str, Any]) -> bytes:
        return _event("content_block_delta", {"index": self._index, "delta": delta})

    def _close(self) -> bytes:
        out, kind = b"", self._open
        if kind is None:
            return out
        if kind == "thinking":
            out = self._delta({"type": "signature_delta", "signature": signature(self._turn_id)})
        elif kind == "tool_use":
            said, self._arguments = input_json(self._arguments), ""
            out = self._delta({"type": "input_json_delta", "partial_json": said})
        self._open = None
        return out + _event("content_block_stop", {"index": self._index})


def _event(name: str, rest: Mapping[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + orjson.dumps({"type": name, **rest}) + b"\n\n"
