"""The Responses wire's output: the items of an answer, the response object around them, and its stream events.

Items of a stream are those of the whole answer, under the same ids. A call's item is done only when the answer is: some
agents run a tool as soon as its item is done, and before the commit nothing is finished.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from turngate.proxy.ask import Answer, Ask, Usage
from turngate.proxy.dialects.responses_input import reasoning_token
from turngate.proxy.dialects.responses_tools import Name, custom_input
from turngate.proxy.errors import GatewayRefusal

Item = dict[str, Any]
Kind = Literal["reasoning", "message", "call"]

IDS: Mapping[str, str] = {"reasoning": "rs", "message": "msg", "call": "fc"}
REASONING_FIELDS = ("reasoning", "reasoning_content")


@dataclass(slots=True)
class Part:
    """One item being said: `text` is its text, or a call's arguments."""

    kind: Kind
    id: str
    index: int
    text: str = ""
    call_id: str = ""
    name: Name = field(default_factory=lambda: Name(""))

    def item(self, status: str, *, token: bool) -> Item:
        """The item as it stands; `token`: reasoning carries what lets it come back without its text."""
        if self.kind == "reasoning":
            content = [reasoning_part(self.text)] if status != "in_progress" else []
            item = {"type": "reasoning", "id": self.id, "status": status, "summary": [], "content": content}
            return {**item, "encrypted_content": reasoning_token(self.text) if token and content else None}
        if self.kind == "message":
            content = [text_part(self.text)] if status != "in_progress" else []
            return {"type": "message", "id": self.id, "status": status, "role": "assistant", "content": content}
        space = {"namespace": self.name.namespace} if self.name.namespace else {}
        head = {"id": self.id, "status": status, "name": self.name.name, **space}
        if self.name.custom:
            said, mark = custom_input(self.text) if status != "in_progress" else ("", "")
            return {"type": "custom_tool_call", **head, "call_id": self.call_id + mark, "input": said}
        arguments = self.text if status != "in_progress" else ""
        return {"type": "function_call", **head, "call_id": self.call_id, "arguments": arguments}


class Parts:
    """The items of one answer, grown by chat deltas."""

    def __init__(self, turn_id: str, names: Mapping[str, Name]) -> None:
        self.all: list[Part] = []
        self._turn_id = turn_id
        self._names = names
        self._calls: dict[int, Part] = {}

    def take(self, delta: Mapping[str, Any]) -> Iterator[tuple[Part, str, bool]]:
        """`(part, text, new)` for every piece of a delta."""
        for key in REASONING_FIELDS:
            if delta.get(key):
                yield self._text("reasoning", delta[key])
        if delta.get("content"):
            yield self._text("message", delta["content"])
        for i, entry in enumerate(delta.get("tool_calls") or ()):
            yield self._call(entry.get("index", i), entry)

    def said_nothing(self) -> Part | None:
        """An empty message, where there is no item at all."""
        return None if self.all else self._new("message")

    def _text(self, kind: Kind, text: str) -> tuple[Part, str, bool]:
        new = not self.all or self.all[-1].kind != kind
        part = self._new(kind) if new else self.all[-1]
        part.text += text
        return part, text, new

    def _call(self, index: int, entry: Mapping[str, Any]) -> tuple[Part, str, bool]:
        function = entry.get("function") or {}
        part, new = self._calls.get(index), index not in self._calls
        if part is None:
            said = function.get("name") or ""
            part = self._calls[index] = self._new("call", self._names.get(said, Name(said)))
            part.call_id = entry.get("id") or ""
        text = function.get("arguments") or ""
        part.text += text
        return part, text, new

    def _new(self, kind: Kind, name: Name | None = None) -> Part:
        prefix = "ctc" if name is not None and name.custom else IDS[kind]
        part = Part(kind, f"{prefix}_{self._turn_id}_{len(self.all)}", len(self.all), name=name or Name(""))
        self.all.append(part)
        return part


def response(turn_id: str, model: str, created_s: int, ask: Ask, status: str) -> dict[str, Any]:
    """The response object before its output: what was asked for, as OpenAI says it back."""
    return {
        "id": f"resp_{turn_id}",
        "object": "response",
        "created_at": created_s,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": model,
        "output": [],
        "previous_response_id": None,
        "store": False,
        "truncation": "disabled",
        "usage": None,
        **ask.about["echo"],
    }


def finished(head: Mapping[str, Any], parts: Parts, answer: Answer, *, token: bool) -> dict[str, Any]:
    """The response object of a complete answer; one that was cut by its token limit is `incomplete`."""
    cut = answer.finish_reason == "length"
    items = [part.item("completed", token=token) for part in parts.all]
    if cut and items:
        items[-1]["status"] = "incomplete"
    return {
        **head,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": items,
        "usage": usage(answer.usage),
    }


def usage(counted: Usage) -> dict[str, Any]:
    """OpenAI's usage object; cached and reasoning tokens are not counted apart."""
    return {
        "input_tokens": counted.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": counted.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counted.prompt_tokens + counted.completion_tokens,
    }


def text_part(text: str) -> Item:
    """The part of a message item."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def reasoning_part(text: str) -> Item:
    """The part of a reasoning item."""
    return {"type": "reasoning_text", "text": text}


class Events:
    """The stream events of one answer, as server-sent event bytes."""

    def __init__(self, turn_id: str, model: str, created_s: int, ask: Ask) -> None:
        self._head = response(turn_id, model, created_s, ask, "in_progress")
        self._token = bool(ask.about["token"])
        self._parts = Parts(turn_id, ask.about["names"])
        self._open: Part | None = None
        self._number = 0

    def start(self, prompt_tokens: int | None) -> None:
        """Usage stands at the end here."""

    def keepalive(self) -> bytes:
        """`response.in_progress`: Codex does not take a comment for a sign of life."""
        return self._started() + self._event("response.in_progress", response=self._head)

    def delta(self, delta: Mapping[str, Any]) -> bytes:
        """One piece of the message; what it begins and ends with it."""
        out = self._started()
        for part, text, new in self._parts.take(delta):
            if new:
                out += self._close() + self._begin(part)
            if text and not part.name.custom:
                out += self._piece(part, text)
        return out

    def end(self, answer: Answer) -> bytes:
        """The rest of all items, and the response."""
        out = self._started()
        empty = self._parts.said_nothing()
        out += self._begin(empty) if empty is not None else b""
        out += self._close()
        done = finished(self._head, self._parts, answer, token=self._token)
        for part, item in zip(self._parts.all, done["output"], strict=True):
            if part.kind == "call":
                out += self._end_call(part, item)
            elif part is self._parts.all[-1]:
                out += self._event("response.output_item.done", output_index=part.index, item=item)
        return out + self._event(f"response.{done['status']}", response=done)

    def error(self, refusal: GatewayRefusal) -> bytes:
        """A fault after the first byte: the response has failed."""
        code = "rate_limit_exceeded" if refusal.status == 429 else "server_error"
        code = "invalid_prompt" if refusal.status < 500 and refusal.status != 429 else code
        error = {"code": code, "message": str(refusal)}
        return self._started() + self._event(
            "response.failed", response={**self._head, "status": "failed", "error": error}
        )

    def _started(self) -> bytes:
        if self._number:
            return b""
        out = self._event("response.created", response=self._head)
        return out + self._event("response.in_progress", response=self._head)

    def _begin(self, part: Part) -> bytes:
        if part.kind == "call" and part.name.custom:
            return b""  # its call id depends on its whole text
        item = part.item("in_progress", token=False)
        out = self._event("response.output_item.added", output_index=part.index, item=item)
        if part.kind == "call":
            return out
        self._open = part
        empty = text_part("") if part.kind == "message" else reasoning_part("")
        return out + self._event("response.content_part.added", **self._at(part), content_index=0, part=empty)

    def _piece(self, part: Part, text: str) -> bytes:
        if part.kind == "call":
            return self._event("response.function_call_arguments.delta", **self._at(part), delta=text)
        if part.kind == "reasoning":
            return self._event("response.reasoning_text.delta", **self._at(part), content_index=0, delta=text)
        return self._event("response.output_text.delta", **self._at(part), content_index=0, delta=text, logprobs=[])

    def _close(self) -> bytes:
        """End the open text; its item too, unless it may be the answer's last."""
        part, self._open = self._open, None
        if part is None:
            return b""
        at = {**self._at(part), "content_index": 0}
        if part.kind == "message":
            out = self._event("response.output_text.done", **at, text=part.text, logprobs=[])
            out += self._event("response.content_part.done", **at, part=text_part(part.text))
        else:
            out = self._event("response.reasoning_text.done", **at, text=part.text)
            out += self._event("response.content_part.done", **at, part=reasoning_part(part.text))
        if part is self._parts.all[-1]:
            return out
        item = part.item("completed", token=self._token)
        return out + self._event("response.output_item.done", output_index=part.index, item=item)

    def _end_call(self, part: Part, item: Item) -> bytes:
        at, out = self._at(part), b""
        if item["type"] == "custom_tool_call":
            added = {**item, "status": "in_progress", "input": ""}
            out += self._event("response.output_item.added", output_index=part.index, item=added)
            out += self._event("response.custom_tool_call_input.delta", **at, delta=item["input"])
            out += self._event("response.custom_tool_call_input.done", **at, input=item["input"])
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            out += self._event("response.function_call_arguments.done", **at, **done)
        return out + self._event("response.output_item.done", output_index=part.index, item=item)

    def _at(self, part: Part) -> dict[str, Any]:
        return {"item_id": part.id, "output_index": part.index}

    def _event(self, kind: str, **rest: Any) -> bytes:
        body = orjson.dumps({"type": kind, "sequence_number": self._number, **rest})
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + body + b"\n\n"
