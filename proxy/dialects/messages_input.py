"""Anthropic Messages, the way in: content blocks become chat messages, which is the only form the gateway works on.

A block keeps its meaning and loses its annotations (cache marks, signatures), so an echoed turn matches what was
recorded however it was cached. Nothing is dropped silently: what has no place in chat form leaves a note.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from turngate.proxy.dialects.messages_json import arguments_of
from turngate.proxy.errors import BadRequest

BILLING_MARK = "x-anthropic-billing-header"
"""How Claude Code's first system block begins; it changes with every request, so it must not stand in a prompt."""

ERROR_PREFIX = "Error: "
"""Before a tool result with `is_error`, for which chat form has no field."""

MAX_NOTES = 32

Block = Mapping[str, Any]
Message = dict[str, Any]


class Notes:
    """What was left out of a request, each once, in order."""

    def __init__(self) -> None:
        self._seen: dict[str, None] = {}

    def add(self, *words: str) -> None:
        """Keep one note of words joined by colons; agents choose some of them, so length and number are limited."""
        if len(self._seen) < MAX_NOTES:
            self._seen[":".join(word[:60] for word in words)] = None

    def all(self) -> tuple[str, ...]:
        """The notes so far."""
        return tuple(self._seen)


def chat_messages(messages: Any, system: Any, notes: Notes) -> list[Message]:
    """The chat messages of a conversation; neighbours of one role become one message, as in Anthropic's API.

    Raises:
        BadRequest: something is wrong with a field, which the message names; or the last message is the assistant's.
    """
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list of at least one message", param="messages")
    turns: list[tuple[str, list[Block]]] = []
    if system is not None and (blocks := _system_blocks(system, notes)):
        turns.append(("system", blocks))
    for i, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("user", "assistant", "system"):
            raise BadRequest(
                f"messages[{i}].role must be user, assistant or system, not {role!r:.60}", param="messages"
            )
        blocks = blocks_of(message.get("content"), f"messages[{i}].content")
        if turns and turns[-1][0] == role:
            turns[-1][1].extend(blocks)
        else:
            turns.append((role, list(blocks)))
    if turns[-1][0] == "assistant":
        raise BadRequest(
            "the last message is the assistant's: an answer cannot be begun for the model (prefill), because every "
            "answer is kept as the model sampled it; end with a user message, and ask for the form you want in words",
            param="messages",
            code="prefill",
        )
    return _in_chat_form(turns, notes)


def blocks_of(content: Any, where: str) -> list[Block]:
    """Content as a list of blocks; a string is one text block.

    Raises:
        BadRequest: it is neither, or a block has no type or no text.
    """
    if content is None or isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    if not isinstance(content, list):
        raise BadRequest(f"{where} must be a string or a list of blocks", param="messages")
    for i, block in enumerate(content):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise BadRequest(f"{where}[{i}] must be an object with type, such as text", param="messages")
        if block["type"] == "text" and not isinstance(block.get("text"), str):
            raise BadRequest(f"{where}[{i}].text must be a string", param="messages")
    return content


def _system_blocks(system: Any, notes: Notes) -> list[Block]:
    """The system prompt's blocks but Claude Code's billing block."""
    blocks = blocks_of(system, "system")
    kept = [block for block in blocks if not str(block.get("text", "")).lstrip().startswith(BILLING_MARK)]
    if len(kept) < len(blocks):
        notes.add("left_out", "billing_block")
    return kept


def _in_chat_form(turns: Sequence[tuple[str, list[Block]]], notes: Notes) -> list[Message]:
    found: list[Message] = []
    called: list[str] = []
    for role, blocks in turns:
        if role == "system":
            found.append({"role": "system", "content": _text(blocks, notes)})
        elif role == "assistant":
            found.append(_assistant(blocks, notes))
            called = [call["id"] for call in found[-1].get("tool_calls", ())]
        else:
            found.extend(_user(blocks, called, notes))
    return found


def _assistant(blocks: Sequence[Block], notes: Notes) -> Message:
    """An assistant message. Texts and thoughts are joined without anything between: a stream cuts them anywhere."""
    content, reasoning, calls = "", "", []
    for block in blocks:
        kind = block["type"]
        if kind == "text":
            content += block["text"]
        elif kind == "thinking":
            reasoning += str(block.get("thinking") or "")
        elif kind == "tool_use":
            calls.append(_tool_call(block))
        elif kind != "redacted_thinking":  # of another model, and nothing that could be rendered
            notes.add("ignored", "block", kind)
    message: Message = {"role": "assistant", "content": content if content or not calls else None}
    if reasoning:
        message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_call(block: Block) -> Message:
    name, call_id, given = block.get("name"), block.get("id"), block.get("input")
    if not isinstance(name, str) or not isinstance(call_id, str):
        raise BadRequest("a tool_use block must have id, name and input", param="messages")
    if given is not None and not isinstance(given, dict):
        raise BadRequest(f"the input of tool_use {call_id!r:.60} must be an object", param="messages")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments_of(given or {})}}


def _user(blocks: Sequence[Block], called: Sequence[str], notes: Notes) -> list[Message]:
    """Tool results first, in the order of the calls they answer: templates often tell them apart by nothing else."""
    results = [block for block in blocks if block["type"] == "tool_result"]
    for block in results:
        if not isinstance(block.get("tool_use_id"), str):
            raise BadRequest("a tool_result block must have the tool_use_id of the call it answers", param="messages")
    place = {call_id: at for at, call_id in enumerate(called)}
    results.sort(key=lambda block: place.get(block["tool_use_id"], len(place)))
    found = [_tool_result(block, notes) for block in results]
    rest = [block for block in blocks if block["type"] != "tool_result"]
    content = _content(rest, notes)
    if content or not results:
        found.append({"role": "user", "content": content})
    return found


def _tool_result(block: Block, notes: Notes) -> Message:
    blocks = blocks_of(block.get("content"), f"the content of the result of {block['tool_use_id']!r:.60}")
    if block.get("is_error"):
        blocks = [{"type": "text", "text": ERROR_PREFIX + _text(blocks, notes)}]
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": _content(blocks, notes)}


def _text(blocks: Sequence[Block], notes: Notes) -> str:
    """The text of blocks that may hold nothing else."""
    content = _content(blocks, notes)
    if not isinstance(content, str):
        raise BadRequest("a system message or an error of a tool holds text only, no images", param="messages")
    return content


def _content(blocks: Sequence[Block], notes: Notes) -> str | list[Message]:
    """Chat content: one text, lines of several joined; a list of parts only where there are images."""
    parts = [part for block in blocks if (part := _part(block, notes)) is not None]
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _part(block: Block, notes: Notes) -> Message | None:
    kind, source = block["type"], block.get("source")
    if kind == "text":
        return {"type": "text", "text": block["text"]}
    if kind == "image":
        return {"type": "image_url", "image_url": {"url": _image_url(source)}}
    if kind == "document" and isinstance(source, dict) and source.get("type") in ("text", "content"):
        told = source.get("data") if source["type"] == "text" else source.get("content")
        return {"type": "text", "text": _text(blocks_of(told, "document.source"), notes)}
    if kind == "document":
        raise BadRequest(
            "documents can be sent as text only (source.type text or content): no engine reads PDF files",
            param="messages",
        )
    if kind == "tool_reference":
        return {"type": "text", "text": f"Tool found: {block.get('tool_name')}"}
    notes.add("ignored", "block", kind)
    return None


def _image_url(source: Any) -> str:
    """An image as the engine takes it; one whose model takes none refuses it in its own words."""
    kind = source.get("type") if isinstance(source, dict) else None
    if kind == "base64" and isinstance(source.get("data"), str) and isinstance(source.get("media_type"), str):
        return f"data:{source['media_type']};base64,{source['data']}"
    if kind == "url" and isinstance(source.get("url"), str):
        return str(source["url"])
    raise BadRequest(
        "an image must have a source of type base64 (media_type, data) or url (url); uploaded files are not known here",
        param="messages",
    )


def chat_tools(tools: Any, notes: Notes) -> list[Message] | None:
    """Chat's tools; those that Anthropic's own servers would run, or whose schema they keep, are left out with a note.

    Raises:
        BadRequest: a tool has no name, or a schema that is no object.
    """
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise BadRequest("tools must be a list", param="tools")
    found = []
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise BadRequest(f"tools[{i}] must be an object with name and input_schema", param="tools")
        kind = tool.get("type") or "custom"
        if "input_schema" not in tool and kind != "custom":
            notes.add("ignored", "tool", str(kind))
            continue
        name, schema, described = tool.get("name"), tool.get("input_schema"), tool.get("description")
        if not isinstance(name, str) or not name or not isinstance(schema, dict):
            raise BadRequest(f"tools[{i}] must have name and input_schema (an object)", param="tools")
        if not isinstance(described, str | None):
            raise BadRequest(f"tools[{i}].description must be a string", param="tools")
        function = {"name": name, **({"description": described} if described else {}), "parameters": schema}
        found.append({"type": "function", "function": function})
    return found or None
