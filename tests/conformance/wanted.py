"""What the tests let a model say and want to find again in what was recorded.

Texts and token ids only; the tokenizer here is the model's own and belongs to no target.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tests.conformance.engines import END, Engine

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a command",
            "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]},
        },
    }
]
NESTED = {"cmd": "ls", "options": {"deep": {"er": {}}}}
BRACES = {"cmd": 'awk \'{ print $1 "}" }\' a; echo "}}{" \\ { }'}
HI = [{"role": "system", "content": "You are an agent."}, {"role": "user", "content": "Begin."}]


class Says:
    """`says([...])` decides what the model says; `text` and `tokens` read what was recorded."""

    def __init__(self, engine: Engine, model: Path) -> None:
        self.engine = engine
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def __call__(self, answers: Any) -> None:
        self.engine.says(answers or None)

    def text(self, ids: list[int]) -> str:
        """Text of tokens, special ones included."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


def calling(*arguments: dict[str, Any], content: str = "") -> dict[str, Any]:
    """An answer that calls bash once for each."""
    return {"content": content, "tool_calls": [{"name": "bash", "arguments": json.dumps(one)} for one in arguments]}


def ended(text: str) -> str:
    """What a complete answer's tokens say."""
    return text + END


def then(message: dict[str, Any], said: str = "Go on.") -> list[dict[str, Any]]:
    """An echoed answer and what comes after it: results of its calls, or the user."""
    calls = message.get("tool_calls") or ()
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "done"} for call in calls]
    return [message, *(results or [{"role": "user", "content": said}])]


def becomes(condition: Callable[[], object], limit_s: float = 60.0) -> bool:
    """Whether `condition` became true within `limit_s`."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.05)
    return True
