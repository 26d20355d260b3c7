"""Tool arguments between two wires: text as sampled in the gateway, an object on Anthropic's.

What the model wrote may be broken JSON, and `tool_use.input` must be an object. Such text travels as the only value of
an object and is taken out again when it comes back, so an echo still matches the recorded turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import orjson

from turngate.proxy.plain import TooDeep, check_depth

UNPARSED = "unparsed_arguments"
"""The key under which arguments that are no JSON object travel."""

_LEVELS_AROUND = 8
"""How deep an input stands in a request: a body's depth is limited, and the echo must pass."""


def input_json(arguments: str) -> str:
    """A `tool_use.input` as JSON: the very text where it is an object, else `{"unparsed_arguments": text}`."""
    found = _object_text(arguments)
    return json.dumps({UNPARSED: arguments}) if found is None else found


def arguments_of(given: Mapping[str, Any]) -> str:
    """The arguments text of an echoed input; the inverse of `input_json` up to how JSON is written."""
    if len(given) == 1 and isinstance(text := given.get(UNPARSED), str) and _object_text(text) is None:
        return text
    return orjson.dumps(given).decode()


def _object_text(arguments: str) -> str | None:
    """Strict JSON of an object, verbatim where it is that already (raw line breaks in strings are escaped), or None."""
    if not arguments.strip():
        return "{}"
    text = arguments
    try:
        try:
            value = orjson.loads(text)
        except orjson.JSONDecodeError:
            text = json.dumps(json.loads(text, strict=False), allow_nan=False)
            value = orjson.loads(text)
        around = value
        for _ in range(_LEVELS_AROUND):
            around = [around]
        check_depth(around)
    except (ValueError, RecursionError, TooDeep):
        return None
    return text if isinstance(value, dict) else None
