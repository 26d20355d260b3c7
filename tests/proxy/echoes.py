"""How harnesses write an assistant turn again: the serialisers seen on the wire, as functions on a recorded message.

Tests hand them to the history index; each must be a rewriting of the same meaning, nothing more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

Message = Mapping[str, Any]


def javascript(text: str) -> str:
    """`JSON.stringify(JSON.parse(text))`: doubles, last of duplicate keys, raw U+2028."""
    return _javascript(json.loads(text, parse_int=float))


def _javascript(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{_string(k)}:{_javascript(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_javascript, value)) + "]"
    if isinstance(value, float):
        return _number(value)
    return _string(value) if isinstance(value, str) else json.dumps(value)


def _string(text: str) -> str:
    raw = json.dumps(text, ensure_ascii=False)
    return "".join(f"\\u{ord(c):04x}" if 0xD800 <= ord(c) <= 0xDFFF else c for c in raw)


def _number(value: float) -> str:
    if value in (float("inf"), float("-inf")):
        return "null"
    if value == 0:
        return "0"
    if 1e-7 <= abs(value) < 1e21:
        text = format(Decimal(repr(value)), "f")
        return text.rstrip("0").rstrip(".") if "." in text else text
    return repr(value)


def _with_arguments(message: Message, write: Callable[[str], Any]) -> dict[str, Any]:
    calls = [
        {**call, "function": {**call["function"], "arguments": write(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else dict(message)


def _without(message: Message, *names: str) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name not in names}


def opencode(message: Message) -> dict[str, Any]:
    """Arguments by JavaScript, empty content as an empty string, reasoning under another name."""
    echo = _with_arguments(message, javascript)
    return {**_without(echo, "reasoning"), "content": echo["content"] or "", "reasoning_content": "as it was"}


def pi(message: Message) -> dict[str, Any]:
    """Arguments by JavaScript, empty content as null."""
    echo = _with_arguments(message, javascript)
    return {**echo, "content": echo["content"] or None, "refusal": None}


def hermes(message: Message) -> dict[str, Any]:
    """Compact Python JSON with sorted keys in ASCII, trimmed text, no reasoning."""
    echo = _with_arguments(message, lambda a: json.dumps(json.loads(a), sort_keys=True, separators=(",", ":")))
    return {**_without(echo, "reasoning"), "content": (echo["content"] or "").strip()}


def mini_swe_agent(message: Message) -> dict[str, Any]:
    """The very strings; the content key is absent when it is empty; annotations of its own."""
    return {**(dict(message) if message["content"] else _without(message, "content")), "annotations": [], "audio": None}


def openhands(message: Message) -> dict[str, Any]:
    """Python's JSON form, content as a list of text parts with cache marks, no reasoning."""
    echo = _without(_with_arguments(message, lambda a: json.dumps(json.loads(a))), "reasoning", "content")
    if message["content"]:
        echo["content"] = [{"type": "text", "text": message["content"], "cache_control": {"type": "ephemeral"}}]
    return echo


def openclaw(message: Message) -> dict[str, Any]:
    """Arguments by JavaScript, ids without what is not alphanumeric."""
    echo = pi(message)
    calls = [{**c, "id": "".join(x for x in c["id"] if x.isalnum())} for c in echo.get("tool_calls", ())]
    return {**echo, "tool_calls": calls} if calls else echo


def claude_code(message: Message) -> dict[str, Any]:
    """Arguments as an object in another key order (what a dialect hands on before it writes them as text)."""
    return _with_arguments(message, lambda a: dict(reversed(json.loads(a).items())))


def codex(message: Message) -> dict[str, Any]:
    """The very strings; of an empty text nothing comes back."""
    return dict(message) if message["content"] else _without(message, "content")


def qwen_code(message: Message) -> dict[str, Any]:
    """Arguments by JavaScript, empty content as null beside calls and as an empty string without, trimmed reasoning."""
    echo = _with_arguments(message, javascript)
    empty = None if echo.get("tool_calls") else ""
    return {**echo, "content": echo["content"] or empty, "reasoning": (echo.get("reasoning") or "").strip()}


def gemini_cli(message: Message) -> dict[str, Any]:
    """Arguments as an object in their order, no reasoning (its own ids: see `test_gemini_echo`)."""
    echo = _with_arguments(message, json.loads)
    return {**_without(echo, "reasoning"), "content": echo["content"] or None}


HARNESSES: tuple[Callable[[Message], dict[str, Any]], ...] = (
    opencode,
    pi,
    hermes,
    mini_swe_agent,
    openhands,
    openclaw,
    claude_code,
    codex,
    qwen_code,
    gemini_cli,
)
