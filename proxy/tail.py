"""The tail: tokens that new messages add after a recorded turn, rendered behind a short stub conversation.

So a turn costs its new messages and not its whole history. Whether a template allows that is found out by rendering
canned conversations both ways; where the two differ, nothing is guessed: `splices` is False and prompts are whole.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
import orjson

from turngate.proxy.canonical import canonical_id, iterate_calls
from turngate.proxy.splice import HistoryIndex, Plan
from turngate.proxy.turns import IntArray

Message = Mapping[str, Any]

Render = Callable[[Mapping[str, Any]], Awaitable[Sequence[int] | IntArray]]
"""Prompt ids of a chat-completions body (`messages`, and where given `tools`, `add_generation_prompt`,
`chat_template_kwargs`). Raises `EngineRefused` where the template or the engine refuses the conversation."""

TEMPLATE_DROPS_REASONING = "template_drops_reasoning"

_STUB_USER: Message = {"role": "user", "content": "Hi"}
_STUB_ANSWER: Message = {"role": "assistant", "content": "Yes"}
_STUB_TOOL = "tool"
_PLAIN_ID = re.compile(r"[A-Za-z0-9_-]*")


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """What a chat template does to history, as probed.

    `end_of_turn` is the id that ends an assistant turn, `end_of_call` the one that ends a turn of tool calls (None:
    tool results cannot be spliced). `splices`: a tail rendered behind a stub equals what the whole rendering has there.
    `splices_tools`: also after tool calls. `stub_needs_tools`: tails differ when the stub is rendered without the
    tools. `drops_earlier_reasoning`: reasoning in its own field vanishes from earlier turns once a user message
    follows; `drops_inline_reasoning`: the same for `<think>…</think>` within the content; `drops_loop_reasoning`:
    reasoning vanishes before tool results as well. `notes` say in words what was odd.
    """

    end_of_turn: int | None = None
    end_of_call: int | None = None
    splices: bool = False
    splices_tools: bool = False
    stub_needs_tools: bool = True
    drops_earlier_reasoning: bool = False
    drops_inline_reasoning: bool = False
    drops_loop_reasoning: bool = False
    notes: tuple[str, ...] = field(default=())

    def takes(self, new_messages: Sequence[Message]) -> bool:
        """Whether the tail of these messages can be rendered behind a stub."""
        return self.splices_tools if answers_calls(new_messages) else self.splices

    def end_after(self, new_messages: Sequence[Message]) -> int | None:
        """The id that ends the recorded turn which these messages follow."""
        return self.end_of_call if answers_calls(new_messages) else self.end_of_turn


class StubCounts:
    """How many end-of-turn ids stubs have by themselves: the same few stubs stand before every turn of a run."""

    def __init__(self, limit: int = 4096) -> None:
        self._counts: dict[bytes, int] = {}
        self._limit = limit

    def get(self, key: bytes | None) -> int | None:
        """The count of a stub, where it is known."""
        return None if key is None else self._counts.get(key)

    def keep(self, key: bytes, count: int) -> None:
        """Remember a count; when full, all are forgotten."""
        if len(self._counts) >= self._limit:
            self._counts.clear()
        self._counts[key] = count


class TailError(ValueError):
    """A tail was asked for that the template cannot give, or the stub did not render as it did in the probe."""


async def render_tail(
    render: Render,
    facts: TemplateFacts,
    new_messages: Sequence[Message],
    tools: Sequence[Message] | None,
    *,
    template_kwargs: Mapping[str, Any] | None = None,
    cut: bool = False,
    response: Message | None = None,
    stubs: StubCounts | None = None,
    context: Any = None,
) -> IntArray:
    """What follows a recorded prompt and completion: `int32[T]`, ending with the generation prompt.

    Args:
        new_messages: at least one; the messages after the recorded answer.
        tools: the request's tools; sent along only where the template needs them.
        cut: the recorded completion does not end with its end-of-turn token: the tail starts with it (never sampled).
        response: the recorded answer; names the stub's tool calls as it named them.
        stubs: what is known of stubs rendered before, with `context`: whatever else `render` adds (JSON).

    Raises:
        TailError: `facts.takes(new_messages)` is False, or the stub is not what it was when probed.
        EngineRefused: the template refuses the new messages.
    """
    end = facts.end_after(new_messages)
    if not new_messages or end is None or not facts.takes(new_messages):
        raise TailError("this template cannot be continued behind a stub: check facts.takes() and render whole prompts")
    body: dict[str, Any] = {}
    if tools and facts.stub_needs_tools:
        body["tools"] = list(tools)
    if template_kwargs:
        body["chat_template_kwargs"] = dict(template_kwargs)
    stub = _stub(new_messages, response)
    key = stub_key(context, body, stub, end)
    count = stubs.get(key) if stubs is not None else None
    if count is None:
        alone = await ids_of(render, {**body, "messages": list(stub), "add_generation_prompt": False})
        count = int(np.count_nonzero(alone == end))
        if stubs is not None and key is not None:
            stubs.keep(key, count)
    tail = _after_stub(await ids_of(render, {**body, "messages": [*stub, *new_messages]}), end, count)
    return np.concatenate([np.asarray([end], dtype=np.int32), tail]) if cut else tail


def append_break(facts: TemplateFacts, index: HistoryIndex, plan: Plan) -> str | None:
    """The cause why appending would differ from what the template means by this history, or None."""
    if plan.kind != "spliced" or plan.base is None:
        return None
    kinds = index.reasoning(plan.base)
    asks = any(message.get("role") == "user" for message in plan.new_messages)
    dropped = (
        ("field" in kinds and asks and facts.drops_earlier_reasoning)
        or ("inline" in kinds and asks and facts.drops_inline_reasoning)
        or ("field" in kinds and facts.drops_loop_reasoning)
    )
    return TEMPLATE_DROPS_REASONING if dropped else None


def answers_calls(new_messages: Sequence[Message]) -> bool:
    """Whether new messages begin with the results of the recorded turn's tool calls."""
    return bool(new_messages) and new_messages[0].get("role") == "tool"


def _stub(new_messages: Sequence[Message], response: Message | None) -> list[Message]:
    """A user and an assistant message after which `new_messages` make sense: with the calls that they answer."""
    if not answers_calls(new_messages):
        return [_STUB_USER, _STUB_ANSWER]
    names = {canonical_id(call_id): name for call_id, name, _ in iterate_calls(response or {})}
    calls = []
    for message in new_messages:
        if message.get("role") != "tool":
            break
        call_id = message.get("tool_call_id")
        name = names.get(canonical_id(call_id)) or message.get("name") or _STUB_TOOL
        calls.append(tool_call(str(call_id or "call000000"), str(name), "{}"))
    return [_STUB_USER, {"role": "assistant", "content": "", "tool_calls": calls}]


def stub_key(context: Any, body: Mapping[str, Any], stub: Sequence[Message], end: int) -> bytes | None:
    """What the count of `end` in a stub depends on: all but its call ids, where those can hold no special token."""
    if not all(_PLAIN_ID.fullmatch(str(call_id)) for one in stub for call_id, _, _ in iterate_calls(one)):
        return None
    names = [[name for _, name, _ in iterate_calls(one)] for one in stub]
    try:
        whole = orjson.dumps([context, body, names, end], option=orjson.OPT_SORT_KEYS)
    except TypeError:
        return None
    return blake2b(whole, digest_size=16).digest()


def tool_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A tool call of an assistant message in the chat dialect."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _after_stub(whole: IntArray, end: int, count: int) -> IntArray:
    """What follows the first `count` ids `end`, as many as the stub has by itself, in the rendering of both."""
    ends = np.flatnonzero(whole == end)
    if count == 0 or len(ends) < count:
        raise TailError(f"the stub has {count} end-of-turn ids ({end}), its continuation {len(ends)}: not spliceable")
    return whole[ends[count - 1] + 1 :].copy()


async def ids_of(render: Render, body: Mapping[str, Any]) -> IntArray:
    """A rendering as `int32[P]`."""
    return np.asarray(await render(body), dtype=np.int32)
