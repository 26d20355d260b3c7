"""Input items of the Responses wire as chat messages: what one sampled turn gave becomes one assistant message again.

An answer goes out as several items (reasoning, message, calls) and comes back as such, so items are put together by the
turn their id names, or by their order where ids were dropped. No state is kept: what refers to some is refused.
"""

from __future__ import annotations

import base64
import binascii
import re
import zlib
from collections.abc import Mapping
from typing import Any

from turngate.proxy.dialects.responses_tools import RAW_MARK, chat_arguments, flat_name
from turngate.proxy.errors import BadRequest

Item = Mapping[str, Any]
Message = dict[str, Any]

TEXT_PARTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})
SYSTEM_ROLES = frozenset({"system", "developer"})
CALLS = ("function_call", "custom_tool_call")
OUTPUTS = ("function_call_output", "custom_tool_call_output")
ITEM_TYPES = ("message", "reasoning", *CALLS, *OUTPUTS)
REASONING_TOKEN = "tg1."
MAX_REASONING_BYTES = 8_000_000

_OUR_ID = re.compile(r"(?:rs|msg|fc|ctc)_([0-9a-f]{8}(?:-?[0-9a-f]{4}){3}-?[0-9a-f]{12})_\d+")


def chat_messages(value: Any, instructions: Any) -> list[Message]:
    """The messages of a request. Instructions and the system and developer items at the start are one system message,
    since many templates take only one; later ones stand where they are.

    Raises:
        BadRequest: an item is wrong, or is of a kind that the gateway cannot show its model.
    """
    if not isinstance(instructions, str | None):
        raise BadRequest("instructions must be a string", param="instructions")
    items = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(items, list) or not items:
        raise BadRequest("input must be a text or a list of at least one item", param="input")
    transcript = _Transcript(instructions)
    for i, item in enumerate(items):
        where = f"input[{i}]"
        if not isinstance(item, Mapping):
            raise BadRequest(f"{where} must be an object with type", param="input")
        transcript.add(item, where)
    return transcript.messages


def reasoning_token(text: str) -> str:
    """What goes out as `encrypted_content`: the same for the same reasoning, and enough to have it back."""
    return REASONING_TOKEN + base64.urlsafe_b64encode(zlib.compress(text.encode("utf-8", "replace"))).decode()


def reasoning_of(token: Any) -> str:
    """The reasoning in a token of `reasoning_token`; empty for any other."""
    if not isinstance(token, str) or not token.startswith(REASONING_TOKEN):
        return ""
    try:
        packed = base64.urlsafe_b64decode(token.removeprefix(REASONING_TOKEN))
        return zlib.decompressobj().decompress(packed, MAX_REASONING_BYTES).decode("utf-8", "replace")
    except (binascii.Error, ValueError, zlib.error):
        return ""


class _Transcript:
    """Messages being put together, item by item."""

    def __init__(self, instructions: str | None) -> None:
        self.messages: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
        self._turn: str | None = None  # of the last assistant message, where its items say so
        self._at_start = True

    def add(self, item: Item, where: str) -> None:
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "message":
            self._message(item, where)
        elif kind == "reasoning":
            self._reasoning(item, where)
        elif kind in CALLS:
            self._call(item, where, custom=kind == "custom_tool_call")
        elif kind in OUTPUTS:
            call_id = _text_field(item, "call_id", where).removesuffix(RAW_MARK)
            content = _texts(item.get("output"), f"{where}.output")
            self._append({"role": "tool", "tool_call_id": call_id, "content": content})
        elif kind == "item_reference":
            raise BadRequest(
                f"{where} refers to an item by its id, but nothing is kept between requests: send the item itself",
                param="input",
            )
        else:
            raise BadRequest(
                f"{where}.type is {kind!r}, which no answer of this gateway has: use one of {', '.join(ITEM_TYPES)}",
                param="input",
            )

    def _message(self, item: Item, where: str) -> None:
        role = item.get("role")
        text = _texts(item.get("content"), f"{where}.content")
        if role == "assistant":
            message = self._assistant(item, "message")
            message["content"] = (message["content"] or "") + text
        elif role == "user":
            self._append({"role": "user", "content": text})
        elif isinstance(role, str) and role in SYSTEM_ROLES:
            if self._at_start and self.messages:
                self.messages[0]["content"] += f"\n\n{text}"
            else:
                self._append({"role": "system", "content": text}, ends_start=False)
        else:
            raise BadRequest(f"{where}.role is {role!r}; use user, assistant, system or developer", param="input")

    def _reasoning(self, item: Item, where: str) -> None:
        text = _texts(item.get("content") or "", f"{where}.content") or reasoning_of(item.get("encrypted_content"))
        text = text or _texts(item.get("summary") or "", f"{where}.summary")
        message = self._assistant(item, "reasoning")
        if text:
            message["reasoning"] = message.get("reasoning", "") + text

    def _call(self, item: Item, where: str, *, custom: bool) -> None:
        call_id, name = _text_field(item, "call_id", where), _text_field(item, "name", where)
        said = _text_field(item, "input" if custom else "arguments", where)
        namespace = item.get("namespace")
        if not isinstance(namespace, str | None):
            raise BadRequest(f"{where}.namespace must be a string", param="input")
        arguments = chat_arguments(said, call_id) if custom else said
        function = {"name": flat_name(name, namespace), "arguments": arguments}
        message = self._assistant(item, "call")
        call = {"id": call_id.removesuffix(RAW_MARK), "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(call)

    def _append(self, message: Message, *, ends_start: bool = True) -> None:
        self.messages.append(message)
        self._at_start = self._at_start and not ends_start
        if message["role"] not in ("assistant", "tool"):
            self._turn = None

    def _assistant(self, item: Item, kind: str) -> Message:
        """The assistant message that an item belongs to.

        Between the items of one turn only results of its own calls may stand; anything else begins a new message.
        """
        named = _OUR_ID.fullmatch(item["id"]) if isinstance(item.get("id"), str) else None
        turn = named.group(1) if named else None
        last = next((one for one in reversed(self.messages) if one["role"] != "tool"), None)
        open_ = last if last is not None and last["role"] == "assistant" else None
        if open_ is not None and turn is not None and self._turn is not None:
            if turn == self._turn:
                return open_
        elif open_ is not None and self.messages[-1] is open_ and _goes_on(open_, kind):
            self._turn = self._turn or turn
            return open_
        message: Message = {"role": "assistant", "content": None}
        self._append(message)
        self._turn = turn
        return message


def _goes_on(message: Message, kind: str) -> bool:
    """Whether an item of `kind` belongs to the turn of `message`, by the order in which a turn's items stand."""
    if kind == "reasoning":
        return message["content"] is None and "tool_calls" not in message
    return kind == "call" or message["content"] is None or "tool_calls" in message


def _texts(content: Any, where: str) -> str:
    """The text of a content: a string, or text parts joined by newlines as engines do.

    Raises:
        BadRequest: there is something in it that is no text.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{where} must be a text or a list of parts", param="input")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, Mapping) else None
        if not isinstance(kind, str) or (kind not in TEXT_PARTS and kind != "refusal"):
            raise BadRequest(
                f"{where}[{i}] is {kind!r}; the gateway's models take text only: send input_text instead", param="input"
            )
        if not isinstance(text, str):
            raise BadRequest(f"{where}[{i}].text must be a string", param="input")
        texts.append(text)
    return "\n".join(texts)


def _text_field(item: Item, key: str, where: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise BadRequest(f"{where}.{key} must be a string", param="input")
    return value
