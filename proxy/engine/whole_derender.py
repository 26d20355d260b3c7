"""Streaming on engines whose derender only takes whole answers (vLLM 0.26): same calls, same deltas.

Plain text is derendered anew as it grows and streamed until the first added token of the tokenizer (a tool call or
thinking marker) appears; from there on the engine's parser must see the whole answer, so the rest comes at its end.
Arguments are then as the parser wrote them again, not verbatim: that form of derender knows no other.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import orjson

from turngate.proxy.engine.errors import EngineFault
from turngate.proxy.engine.wire import Delta, State, clean_delta

Whole = Callable[[Sequence[int], bool], Awaitable[Mapping[str, Any]]]
"""`(all ids so far, parsed) -> message`; unparsed is plain text with special tokens left out."""


class WholeDerender:
    """`Derender` for one answer.

    Args:
        whole: one call of the engine's whole-answer derender.
        markers: token ids after which plain text may not be streamed; None: nothing is known, nothing streams early.
    """

    def __init__(self, whole: Whole, markers: frozenset[int] | None) -> None:
        self._whole = whole
        self._markers = markers

    async def __call__(self, ids: Sequence[int], finish: str | None, state: State | None) -> tuple[Delta, State]:
        """See `replica.Derender`."""
        before = state or {"ids": [], "content": ""}
        all_ids = [*before["ids"], *ids]
        said = str(before["content"])
        if not all_ids:
            return {}, {"ids": [], "content": said}
        if finish is None:
            if self._markers is None or not self._markers.isdisjoint(all_ids):
                return {}, {"ids": all_ids, "content": said}
            text = str((await self._whole(all_ids, False)).get("content") or "").rstrip("\ufffd")
            if not text.startswith(said):
                return {}, {"ids": all_ids, "content": said}
            return clean_delta({"content": text[len(said) :]}), {"ids": all_ids, "content": text}
        message = await self._whole(all_ids, True)
        content = str(message.get("content") or "")
        if not content.startswith(said):
            content = said  # the parser trims what was streamed already
        calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls") or ())]
        rest = {**message, "content": content[len(said) :], "tool_calls": calls}
        return clean_delta(rest), {"ids": all_ids, "content": content}


def parse_whole(value: Any) -> Mapping[str, Any]:
    """The message in a whole-answer derender's answer.

    Raises:
        EngineFault: it is something else.
    """
    try:
        message = value["choices"][0]["message"]
        return dict(message)
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise EngineFault(f"derender answered something that is not a chat completion: {value!r:.300}") from error


def added_token_ids(tokenizer_json: bytes) -> frozenset[int] | None:
    """Ids of the added tokens in a `tokenizer.json`: where markers of tool calls and thinking are. None: unreadable."""
    try:
        return frozenset(int(token["id"]) for token in orjson.loads(tokenizer_json)["added_tokens"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None
