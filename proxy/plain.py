"""Values that came from outside, made safe to keep: bounded depth, no lone surrogates, no NaN.

JavaScript cuts texts in the middle of a character and Python writes NaN; neither is JSON that anything downstream
takes. Such text gets U+FFFD where half a character stood. Nothing here may change a value that was sound.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

MAX_DEPTH = 100
"""How deeply values may nest: far above any tool's schema, far below every encoder's own limit."""

# One escape of a JSON text at a time: a whole pair, half a pair, or anything else.
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)
_CONTAINERS = (dict, list, tuple)
_SURROGATE = re.compile("[\ud800-\udfff]")


class TooDeep(ValueError):
    """A value nests deeper than `MAX_DEPTH`."""


def mend_escapes(raw: bytes) -> bytes:
    r"""JSON bytes with every `\uD8xx` that is half a pair replaced by `\ufffd`."""
    return _ESCAPE.sub(lambda found: rb"\ufffd" if found.group(1) else found.group(0), raw)


def check_depth(value: Any) -> None:
    """Refuse what nests too deeply.

    Raises:
        TooDeep: deeper than `MAX_DEPTH`.
    """
    level = [value] if isinstance(value, _CONTAINERS) else []
    for _ in range(MAX_DEPTH):
        level = [child for one in level for child in _children(one) if isinstance(child, _CONTAINERS)]
        if not level:
            return
    raise TooDeep(f"values nest deeper than {MAX_DEPTH} levels")


def plain(value: Any, *, nulls: bool = False) -> Any:
    """`value` with U+FFFD for lone surrogates, in containers too; with `nulls`, None for NaN and infinities.

    Raises:
        TooDeep: deeper than `MAX_DEPTH`.
    """
    check_depth(value)
    return _plain(value, nulls)


def _plain(value: Any, nulls: bool) -> Any:
    if isinstance(value, str):
        return value if value.isascii() else _SURROGATE.sub("\ufffd", value)
    if isinstance(value, dict):
        return {_plain(key, nulls): _plain(one, nulls) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one, nulls) for one in value]
    if nulls and isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _children(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value
