"""Chat messages as blocks that a page can show: text, code, reasoning, tool calls and results.

Agents and models write anything here, so every shape is accepted and nothing is dropped: what is not understood is
shown as JSON. Nothing here marks text as safe; the templates escape it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FOLD_LINES = 14
FOLD_CHARS = 1600
FOLD_SYSTEM_LINES = 6
_FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a tool call; `block` when it reads better on its own lines."""

    name: str
    value: str
    block: bool


@dataclass(frozen=True, slots=True)
class Block:
    """One part of a message. `kind`: text, code, reasoning, call, image or json.

    For a call, `title` is the tool, `text` the argument string exactly as sampled, `note` its id, and `arguments` is
    empty when that string is not a JSON object.
    """

    kind: str
    text: str
    title: str = ""
    note: str = ""
    arguments: tuple[Argument, ...] = ()

    @property
    def lines(self) -> int:
        """How many lines the text has."""
        return self.text.count("\n") + 1

    @property
    def long(self) -> bool:
        """Whether it is folded at first."""
        return self.lines > FOLD_LINES or len(self.text) > FOLD_CHARS

    @property
    def preview(self) -> str:
        """The first line with something in it, cut."""
        line = next((line.strip() for line in self.text.splitlines() if line.strip()), "")
        return line if len(line) <= 140 else line[:139] + "…"


@dataclass(frozen=True, slots=True)
class Message:
    """One message: its role, the tool it answers for (`note`), and its blocks."""

    role: str
    blocks: tuple[Block, ...]
    note: str = ""

    @property
    def long(self) -> bool:
        """Whether it is folded at first: system prompts of some length and long tool results are."""
        if self.role in ("system", "developer"):
            return self.lines > FOLD_SYSTEM_LINES or any(block.long for block in self.blocks)
        return self.role == "tool" and any(block.long for block in self.blocks)

    @property
    def lines(self) -> int:
        """Lines of all blocks."""
        return sum(block.lines for block in self.blocks)

    @property
    def preview(self) -> str:
        """The first block's first line."""
        return self.blocks[0].preview if self.blocks else ""


def view_message(message: Any, tool_names: Mapping[str, str] | None = None) -> Message:
    """`message` as blocks; `tool_names` maps tool-call ids to the tool, so a result names what it answers."""
    if not isinstance(message, Mapping):
        return Message("unknown", (Block("json", pretty(message)),))
    role = str(message.get("role", "unknown"))
    blocks = list(_blocks(message))
    call_id = str(message.get("tool_call_id") or "")
    note = (tool_names or {}).get(call_id, "") or str(message.get("name") or "") or call_id
    return Message(role, tuple(blocks), note if role == "tool" else "")


def tool_names(messages: Sequence[Any]) -> dict[str, str]:
    """Tool-call ids of `messages` and the tools they called."""
    names: dict[str, str] = {}
    for message in messages:
        for call in (message.get("tool_calls") or ()) if isinstance(message, Mapping) else ():
            if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping):
                names[str(call.get("id") or "")] = str(call["function"].get("name") or "")
    return names


def pretty(value: Any) -> str:
    """JSON with indents, unicode as it is; `repr` for what JSON cannot say."""
    return json.dumps(value, indent=2, ensure_ascii=False, default=repr)


def _blocks(message: Mapping[str, Any]) -> Iterator[Block]:
    for key in ("reasoning", "reasoning_content", "thinking"):
        if isinstance(message.get(key), str) and message[key]:
            yield Block("reasoning", message[key])
            break
    yield from _content(message.get("content"))
    for call in message.get("tool_calls") or ():
        yield _call(call)
    if message.get("refusal"):
        yield Block("text", str(message["refusal"]), note="refusal")


def _content(content: Any) -> Iterator[Block]:
    if content is None or content == "":
        return
    if isinstance(content, str):
        yield from _prose(content)
        return
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
            yield from _prose(part["text"])
        elif kind in ("image_url", "input_image", "image"):
            yield Block("image", pretty(part)[:400], title="image")
        else:
            yield Block("json", part if isinstance(part, str) else pretty(part))


def _prose(text: str) -> Iterator[Block]:
    end = 0
    for fence in _FENCE.finditer(text):
        if text[end : fence.start()].strip():
            yield Block("text", text[end : fence.start()].strip("\n"))
        yield Block("code", fence.group(2).rstrip("\n"), title=fence.group(1).strip())
        end = fence.end()
    if text[end:].strip() or end == 0:
        yield Block("text", text[end:].strip("\n") if end else text)


def _call(call: Any) -> Block:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return Block("json", pretty(call))
    raw = function.get("arguments")
    text = raw if isinstance(raw, str) else pretty(raw)
    return Block("call", text, str(function.get("name") or "?"), str(call.get("id") or ""), tuple(_arguments(text)))


def _arguments(text: str) -> Iterator[Argument]:
    try:
        parsed = json.loads(text)
    except ValueError:
        return
    if not isinstance(parsed, dict):
        return
    for name, value in parsed.items():
        shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        yield Argument(name, shown, "\n" in shown or len(shown) > 90)
