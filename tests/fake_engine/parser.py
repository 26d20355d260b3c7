"""Model text to reasoning, content and tool calls, the way vLLM's hermes and reasoning parsers stream them.

Stateless: a delta is the difference of two parses, so each parse of a longer text must extend that of a shorter one.
Arguments are verbatim.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_THINK, _THOUGHT = "<think>", "</think>"
_NAME = re.compile(r'"name"\s*:\s*"([^"]*)"')
_ARGUMENTS = re.compile(r'"arguments"\s*:\s*')


@dataclass(frozen=True)
class Parsed:
    """What a text says; `calls` are (name, arguments text)."""

    reasoning: str
    content: str
    calls: tuple[tuple[str, str], ...]


def parse(text: str, *, thinking: bool, final: bool) -> Parsed:
    """Parse all text so far. `thinking`: the prompt left a reasoning block open. Not `final`: hold back markers."""
    reasoning = ""
    if not thinking and text.startswith(_THINK):
        text, thinking = text[len(_THINK) :], True
    elif not thinking and not final and _THINK.startswith(text):
        return Parsed("", "", ())
    if thinking:
        reasoning, found, text = text.partition(_THOUGHT)
        if not found:
            return Parsed(_held(reasoning, _THOUGHT, final), "", ())
    content, found, rest = text.partition(_OPEN)
    if not found:
        return Parsed(reasoning, _held(content, _OPEN, final), ())
    calls = []
    while found:
        region, closed, rest = rest.partition(_CLOSE)
        call = _call(region if closed else _held(region, _CLOSE, final), whole=bool(closed) or final)
        if call is not None:
            calls.append(call)
        _, found, rest = rest.partition(_OPEN)
    return Parsed(reasoning, content, tuple(calls))


def deltas(before: Parsed, now: Parsed, ids: list[str]) -> dict[str, Any]:
    """vLLM's delta between two parses; `ids` are the call ids minted so far and grow with new calls."""
    out: dict[str, Any] = {"role": None, "content": None, "reasoning": None}
    if now.reasoning != before.reasoning:
        out["reasoning"] = now.reasoning[len(before.reasoning) :]
    if now.content != before.content:
        out["content"] = now.content[len(before.content) :]
    entries = []
    for index, (name, arguments) in enumerate(now.calls):
        known = before.calls[index][1] if index < len(before.calls) else None
        if known is None:
            if index >= len(ids):
                ids.append(f"chatcmpl-tool-{index:016x}")
            entries.append(_entry(index, name, None, ids[index]))
            known = ""
        if arguments != known:
            entries.append(_entry(index, None, arguments[len(known) :], None))
    if entries:
        out["tool_calls"] = entries
    return out


def _entry(index: int, name: str | None, arguments: str | None, call_id: str | None) -> dict[str, Any]:
    kind = "function" if call_id else None
    return {"id": call_id, "type": kind, "index": index, "function": {"name": name, "arguments": arguments}}


def _held(text: str, marker: str, final: bool) -> str:
    """`text` without an end that could be the beginning of `marker`."""
    if final:
        return text
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-length:]):
            return text[:-length]
    return text


def _call(region: str, *, whole: bool) -> tuple[str, str] | None:
    name = _NAME.search(region)
    if name is None:
        return None
    start = _ARGUMENTS.search(region)
    if start is None:
        return (name[1], "")
    value = region[start.end() :]
    end = _value_end(value)
    if end is not None:
        return (name[1], value[:end])
    return (name[1], value.rstrip() if whole else value[: len(value.rstrip())])


def _value_end(text: str) -> int | None:
    """Where the JSON object or array that `text` begins with ends; None while it is open."""
    depth, quoted, escaped = 0, False, False
    for at, char in enumerate(text):
        if quoted:
            quoted, escaped = (char != '"' or escaped), (char == "\\" and not escaped)
        elif char == '"':
            quoted = True
        elif char in "{[":
            depth += 1
        elif char in "}]":
            depth -= 1
            if depth <= 0:
                return at + 1
    return None
