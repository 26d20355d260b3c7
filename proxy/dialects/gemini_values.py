"""Gemini's values and what they are in chat form: arguments of calls, results of functions, schemas, field names.

Pure functions. A value that Gemini's form cannot hold (arguments that are no JSON object) is wrapped so that the very
text comes back from its echo; nothing may be mended on the way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import orjson

from turngate.proxy.canonical import canonical_arguments

RAW = "raw"
"""The one key of the object that carries arguments which are no JSON object, as `prompting.renderable` has it."""

_ONE_LINE = {ord("\n"): " ", ord("\r"): " "}
"""Line breaks between the tokens of JSON are spaces; within an event they would end it."""

_NO_NUMBER = '"\\u0000NaN"'
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "defs")
_SCHEMA_LISTS = ("anyOf", "any_of", "oneOf", "allOf", "prefixItems", "prefix_items")
_SCHEMA_ONE = ("items", "additionalProperties", "additional_properties")
_DIGITS = 18
"""Longest text read as a number: what is longer is beyond 64 bits, and slow to read."""

_SCHEMA_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")


def field(source: Mapping[str, Any], name: str) -> Any:
    """The field that protobuf's JSON calls `name` (camelCase), which may also be written in snake_case."""
    found = source.get(name)
    return source.get(snake(name)) if found is None else found


def snake(name: str) -> str:
    """`functionCall` -> `function_call`."""
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)


def wire_arguments(text: str) -> Any:
    """Sampled arguments as a JSON object that `orjson` writes; what is no JSON object becomes `{"raw": text}`."""
    written = _object_text(text)
    if written is None:
        return {RAW: text.encode("utf-8", "replace").decode()}
    return orjson.Fragment(written.translate(_ONE_LINE))


def chat_arguments(args: Any) -> str:
    """The arguments' text in chat form, from an echoed `args`; the inverse of `wire_arguments` up to spelling."""
    if args is None:
        return "{}"
    if isinstance(args, Mapping) and _is_wrapped(args):
        return str(args[RAW])
    return orjson.dumps(args).decode()


def result_text(response: Any) -> str:
    """What a function's response says, as the text of a tool message.

    A lone `output` or `result` (gemini-cli's and the SDK's words) stands for itself; anything else is written as JSON
    with sorted keys, whole numbers without a point, so that every spelling of the same object is the same text.
    """
    if isinstance(response, Mapping) and len(response) == 1:
        response = next((response[key] for key in ("output", "result") if key in response), response)
    if isinstance(response, str):
        return response
    return json.dumps(_numbers(response), ensure_ascii=False, sort_keys=True)


def json_schema(schema: Any) -> Any:
    """JSON Schema from Gemini's: lower-case types, `nullable` as a type, counts as numbers; the rest as it is."""
    if not isinstance(schema, Mapping):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        camel = _camel(key)
        if key in _SCHEMA_MAPS and isinstance(value, Mapping):
            made[key] = {name: json_schema(one) for name, one in value.items()}
        elif key in _SCHEMA_LISTS and isinstance(value, list):
            made[camel] = [json_schema(one) for one in value]
        elif key in _SCHEMA_ONE:
            made[camel] = json_schema(value)
        elif camel in _SCHEMA_COUNTS:
            made[camel] = whole_number(value)
        elif key == "type":
            made[key] = _lower(value)
        elif camel not in ("nullable", "propertyOrdering"):
            made[camel] = value
    if schema.get("nullable") is True and isinstance(made.get("type"), str):
        made["type"] = [made["type"], "null"]
    return made


def whole_number(value: Any) -> Any:
    """A whole number that protobuf's JSON wrote as text, as the SDK also does with floats; anything else as it is."""
    if isinstance(value, str) and len(value) <= _DIGITS and value.removeprefix("-").isdecimal():
        return int(value)
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def _object_text(text: str) -> str | None:
    """Strict JSON of the object that `text` means, as it is written where it can be; None where it must be wrapped."""
    try:
        value, written = orjson.loads(text), text
    except orjson.JSONDecodeError:
        canonical = canonical_arguments(text)  # blank, raw line breaks, numbers beyond the doubles: still an object
        if not canonical.startswith("j{") or _NO_NUMBER in canonical:
            return None
        try:
            value, written = orjson.loads(canonical[1:]), canonical[1:]
        except orjson.JSONDecodeError:  # half characters
            return None
    return written if isinstance(value, dict) and not _is_wrapped(value) else None


def _is_wrapped(value: Mapping[str, Any]) -> bool:
    """Whether `value` is `{"raw": text}` with a text that would have been wrapped."""
    return len(value) == 1 and isinstance(value.get(RAW), str) and _object_text(value[RAW]) is None


def _numbers(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _numbers(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_numbers(one) for one in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value


def _lower(kind: Any) -> Any:
    if isinstance(kind, str):
        return kind.lower()
    return [_lower(one) for one in kind] if isinstance(kind, list) else kind


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(word[:1].upper() + word[1:] for word in rest) if head else name
