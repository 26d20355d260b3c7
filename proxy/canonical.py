"""Canonical digests of messages: equal however a harness writes a turn again, different when its meaning changed.

Agents echo a sampled turn re-serialised (JavaScript numbers, sorted keys, trimmed text, other ids), so history is
matched by meaning and never by bytes. Nothing here may be used to rebuild tokens: a canonical form only compares.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

START = b"turngate history"
"""The digest chain of an empty history."""

DIGEST_BYTES = 16

_CONTENT = 2  # place of the content in `canonical_message`

_NOT_ALPHANUMERIC = re.compile(r"[^A-Za-z0-9]+")
# What Python's strip() and JavaScript's trim() remove, together: harnesses are written in both.
_BLANK = "".join(chr(c) for c in range(0x3001) if chr(c).isspace()) + "\ufeff"
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_ANNOTATIONS = frozenset({"cache_control"})
_REASONING_FIELDS = ("reasoning_content", "reasoning", "reasoning_text", "reasoning_details", "thinking")
_NAMED_ROLES = frozenset({"user", "system", "developer"})


def chain(previous: bytes, message: Mapping[str, Any]) -> bytes:
    """The digest (16 bytes) of a history that ends with `message`, from the digest of what stands before it."""
    return chain_digest(previous, message_digest(message))


def chain_digest(previous: bytes, digest: bytes) -> bytes:
    """`chain` for a message whose `message_digest` is known."""
    return blake2b(previous + digest, digest_size=DIGEST_BYTES).digest()


def chain_all(messages: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Digests of every head of `messages`: entry i stands for the first i messages, so there is one more than those."""
    keys = [START]
    for message in messages:
        keys.append(chain(keys[-1], message))
    return keys


def message_digest(message: Mapping[str, Any]) -> bytes:
    """The digest (16 bytes) of one message by itself."""
    meaning = canonical_message(message)
    text = meaning[_CONTENT] if isinstance(meaning[_CONTENT], str) else None
    if text is not None:
        meaning[_CONTENT] = True  # hashed as it is below: escaping long texts would cost most of the time
    rest = _dump(meaning)
    digest = blake2b(len(rest).to_bytes(8, "big") + rest, digest_size=DIGEST_BYTES)
    if text is not None:
        digest.update(text.encode("utf-8", "surrogatepass"))
    return digest.digest()


def tools_digest(tools: Sequence[Mapping[str, Any]] | None) -> bytes:
    """The digest (16 bytes) of a tool list: order counts, the order of keys does not; None equals an empty list."""
    plain = [_without_annotations(tool) for tool in tools or ()]
    return blake2b(_dump(plain), digest_size=DIGEST_BYTES).digest()


def canonical_message(message: Mapping[str, Any]) -> list[Any]:
    """What `message` means: role, speaker, content, tool calls, the call it answers; all else is ignored."""
    role = str(message.get("role", ""))
    name = message.get("name") if role in _NAMED_ROLES else None
    answers = message.get("tool_call_id") if role == "tool" else None
    return [
        role,
        name or None,
        canonical_content(message.get("content")),
        canonical_calls(message),
        canonical_id(answers) if answers is not None else None,
    ]


def canonical_content(content: Any) -> Any:
    """Text without margins, text parts joined by newlines as engines do; None for nothing; other parts stay."""
    if content is None or isinstance(content, str):
        return (content or "").strip(_BLANK) or None
    if not isinstance(content, Sequence):
        return [_without_annotations(content)]
    pieces: list[Any] = []
    texts: list[str] = []
    for part in content:
        text = _text_of(part)
        if text is not None:
            texts.append(text)
            continue
        pieces += [piece for piece in [_joined(texts)] if piece is not None]
        pieces.append([_without_annotations(part)])
        texts = []
    pieces += [piece for piece in [_joined(texts)] if piece is not None]
    if not pieces:
        return None
    return pieces[0] if len(pieces) == 1 and isinstance(pieces[0], str) else pieces


def canonical_calls(message: Mapping[str, Any]) -> list[list[Any]]:
    """The tool calls of an assistant message as `[id, name, arguments]`, in order."""
    return [
        [canonical_id(call_id), str(name or ""), canonical_arguments(arguments)]
        for call_id, name, arguments in iterate_calls(message)
    ]


def iterate_calls(message: Mapping[str, Any]) -> Iterator[tuple[Any, Any, Any]]:
    """`(id, name, arguments)` of each tool call of `message`, as written."""
    for call in message.get("tool_calls") or ():
        if isinstance(call, Mapping):
            function = call.get("function") or call.get("custom") or {}
            yield call.get("id"), function.get("name"), function.get("arguments", function.get("input"))
    legacy = message.get("function_call")
    if isinstance(legacy, Mapping):
        yield None, legacy.get("name"), legacy.get("arguments")


def canonical_id(call_id: Any) -> str:
    """A tool-call id reduced to its ASCII letters and digits, which is what survives every harness."""
    return _NOT_ALPHANUMERIC.sub("", str(call_id or ""))


def canonical_arguments(arguments: Any) -> str:
    """Tool arguments as sorted JSON with numbers as doubles (`j…`), or verbatim where they are no JSON (`v…`).

    Numbers beyond the doubles become null, as JavaScript writes them; blank arguments equal `{}`.
    """
    text: str = arguments if isinstance(arguments, str) else json.dumps({} if arguments is None else arguments)
    if not text.strip(_BLANK):
        return "j{}"
    try:
        return "j" + _sorted_json(_JSON.decode(text.lstrip("\ufeff")))
    except (ValueError, RecursionError):
        return "v" + text


def reasoning_kinds(message: Mapping[str, Any]) -> frozenset[str]:
    """How `message` carries reasoning: `field` (a field of its own), `inline` (a closing think mark in the content)."""
    kinds = set()
    if any(message.get(name) for name in _REASONING_FIELDS):
        kinds.add("field")
    content = canonical_content(message.get("content"))
    if isinstance(content, str) and "</think>" in content:
        kinds.add("inline")
    return frozenset(kinds)


def same_json(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal to the last type: Python takes 1, 1.0 and true for the same."""
    if one is other:
        return True
    kind = type(one)
    if kind is not type(other) or one != other:
        return False
    if kind is dict:
        return all(type(value) is str or same_json(value, other[key]) for key, value in one.items())
    if kind is list:
        return all(map(same_json, one, other))
    return True


def _text_of(part: Any) -> str | None:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS:
        return str(part.get("text") or "")
    return None


def _joined(texts: Sequence[str]) -> str | None:
    return "\n".join(texts).strip(_BLANK) or None


def _without_annotations(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _without_annotations(v) for k, v in value.items() if k not in _ANNOTATIONS and v is not None}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_without_annotations(item) for item in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _number(value)
    return value


def _number(text: str | int | float) -> float | None:
    try:
        value = float(text)
    except OverflowError:
        return None
    return None if math.isinf(value) else value + 0.0  # -0.0 + 0.0 is 0.0, as JavaScript writes it


def _constant(name: str) -> str | None:
    return "\x00NaN" if name == "NaN" else None


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"))
# strict=False: a raw line break inside a string means the same as its escape.
_JSON = json.JSONDecoder(parse_int=_number, parse_float=_number, parse_constant=_constant, strict=False)


def _sorted_json(value: Any) -> str:
    return _ENCODER.encode(value)


def _dump(value: Any) -> bytes:
    return _sorted_json(value).encode("ascii")
