"""Names for the tool calls of wires that carry none: made from what a call says, so that every echo gives the same one.

Gemini's clients send calls back without ids, or with their own. A call is therefore named by its function, the meaning
of its arguments and how often the conversation made the same call before. Nothing here may depend on time or chance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from turngate.proxy.canonical import canonical_arguments, iterate_calls

NAME_BYTES = 10


class CallNames:
    """Names the calls of one conversation, in order; `before` counts the calls that precede."""

    def __init__(self, before: Mapping[str, int] | None = None) -> None:
        self._made: Counter[str] = Counter(before or {})

    @property
    def made(self) -> Mapping[str, int]:
        """How often each call was made so far."""
        return dict(self._made)

    def name(self, function: str, arguments: Any) -> str:
        """An alphanumeric id for the next call."""
        said = f"{function}\n{canonical_arguments(arguments)}".encode("utf-8", "surrogatepass")
        call = blake2b(said, digest_size=NAME_BYTES).hexdigest()
        number = self._made[call]
        self._made[call] += 1
        again = blake2b(f"{call}{number}".encode(), digest_size=NAME_BYTES).hexdigest() if number else call
        return f"call{again}"


def with_named_calls(message: Mapping[str, Any], before: Mapping[str, int]) -> Mapping[str, Any]:
    """An assistant message in chat form whose calls have the names that its echo will have."""
    if not message.get("tool_calls"):
        return message
    names = CallNames(before)
    said = [names.name(str(name or ""), arguments) for _, name, arguments in iterate_calls(message)]
    return {
        **message,
        "tool_calls": [{**call, "id": call_id} for call, call_id in zip(message["tool_calls"], said, strict=True)],
    }
