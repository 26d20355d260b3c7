"""Finding out what a chat template does to history, by rendering canned conversations behind the engine's render call.

Every claim is checked against whole renderings before it is believed, and a template that fails a check is rendered
whole ever after. Once a model at start; it must never fall back on a template's name or text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from turngate.proxy.engine.errors import EngineRefused
from turngate.proxy.tail import Message, Render, TailError, TemplateFacts, ids_of, render_tail, tool_call
from turngate.proxy.turns import IntArray

_SYSTEM: Message = {"role": "system", "content": "Be brief."}
_ASK: Message = {"role": "user", "content": "What is\n\n 2 + 2?  Say  it.\n"}
_MORE: tuple[Message, ...] = ({"role": "user", "content": "And 3 + 4, in words?"},)
_ANSWERS = ("alpha", "Zebra 9", "it is (so)")
_CALLS = (("a", "alpha"), ("b", "Zebra 9"), ("c", "it is (so)"))
_IDS = ("callAbc01", "callDef02")
_PLAIN = "one\ntwo\n\nthree  four\t5: “six”!\n"
_TOOL: Message = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    },
}
_REFUSED = "refused: "
_REASONINGS = ("pondering deeply", "one two three")


async def probe_template(render: Render) -> TemplateFacts:
    """What the template behind `render` does; about 40 small renderings.

    Raises:
        EngineUnavailable: the engine went away; a refusal (`EngineRefused`) is a finding and not raised.
    """
    text, text_end, text_notes = await _splices(render, _answers(), [_MORE])
    loop = [_results(1), (*_results(1), *_MORE)]
    calls, call_end, call_notes = await _splices(render, _callers(1), loop)
    if calls:
        # A template may refuse parallel calls: it then refuses the whole rendering too, which is no harm here.
        both, both_end, notes = await _splices(render, _callers(2), [_results(2)])
        calls = both_end in (call_end, None) and (both or all(note.startswith(_REFUSED) for note in notes))
        call_notes = (*call_notes, *notes)
    bare = await _tools_do_not_matter(render, text_end, call_end if calls else None) if text else False
    return TemplateFacts(
        end_of_turn=text_end,
        end_of_call=call_end if calls else None,
        splices=text,
        splices_tools=text and calls,
        stub_needs_tools=not bare,
        drops_earlier_reasoning=await _drops(render, _MORE, inline=False),
        drops_inline_reasoning=await _drops(render, _MORE, inline=True),
        drops_loop_reasoning=await _drops(render, _results(1), inline=False),
        notes=(*text_notes, *(f"tool calls: {note}" for note in call_notes)),
    )


def _answers() -> list[Message]:
    return [{"role": "assistant", "content": text} for text in _ANSWERS]


def _callers(count: int) -> list[Message]:
    """Assistant messages with `count` tool calls that differ in text and in the last call's arguments."""
    return [
        {
            "role": "assistant",
            "content": text,
            "tool_calls": [tool_call(_IDS[n], "look", f'{{"at": "{text}"}}') for n in range(count)],
        }
        for _, text in _CALLS
    ]


def _results(count: int) -> tuple[Message, ...]:
    return tuple({"role": "tool", "tool_call_id": _IDS[n], "content": f"{n + 7} files"} for n in range(count))


async def _splices(
    render: Render, answers: Sequence[Message], continuations: Sequence[Sequence[Message]]
) -> tuple[bool, int | None, tuple[str, ...]]:
    """Whether tails behind a stub are right after each of `answers`; the end-of-turn id; what was odd."""
    end: int | None = None
    try:
        end = await _end_of_turn(render, answers)
        if end is None:
            return False, None, ("no token ends every answer",)
        facts = TemplateFacts(end_of_turn=end, end_of_call=end, splices=True, splices_tools=True)
        system = [_SYSTEM] if await _takes(render, {"messages": [_SYSTEM, _ASK]}) else []
        for tools in [None, [_TOOL]] if await _takes(render, {"messages": [_ASK], "tools": [_TOOL]}) else [None]:
            for new_messages in continuations:
                body = {"tools": list(tools)} if tools else {}
                for head in [(_ASK,), (*system, _ASK), (*system, _ASK, answers[0], *new_messages)]:
                    expected = await _shared_end(render, body, head, answers, new_messages)
                    tail = await render_tail(render, facts, new_messages, tools, response=answers[0])
                    if not _ends_with(expected, end, tail):
                        return False, end, (f"a tail differs from the whole rendering (tools: {bool(tools)})",)
    except TailError as error:
        return False, end, (str(error),)
    except EngineRefused as error:
        return False, end, (f"{_REFUSED}{error}"[:200],)
    return True, end, ()


async def _takes(render: Render, body: Mapping[str, Any]) -> bool:
    try:
        await ids_of(render, body)
    except EngineRefused:
        return False
    return True


async def _end_of_turn(render: Render, answers: Sequence[Message]) -> int | None:
    """The first id after every answer, when it is no part of plain text."""
    endings = await _shared_end(render, {"add_generation_prompt": False}, (_ASK,), answers, ())
    calls = bool(answers[0].get("tool_calls"))
    texts = await _shared_end(render, {"add_generation_prompt": False}, (_ASK,), _answers(), ())
    if not len(texts):
        return None
    end = int(texts[0])
    if calls and not np.any(endings == end):
        return None
    plain = await ids_of(
        render, {"messages": [{"role": "user", "content": _PLAIN}, _answers()[0]], "add_generation_prompt": False}
    )
    short = await ids_of(render, {"messages": [_ASK, _answers()[0]], "add_generation_prompt": False})
    return end if np.count_nonzero(plain == end) == np.count_nonzero(short == end) else None


async def _shared_end(
    render: Render,
    body: Mapping[str, Any],
    head: Sequence[Message],
    answers: Sequence[Message],
    new_messages: Sequence[Message],
) -> IntArray:
    """The ids that all renderings of `head + answer + new_messages` end with: what follows the answer's own tokens."""
    shared: IntArray | None = None
    for answer in answers:
        ids = await ids_of(render, {**body, "messages": [*head, answer, *new_messages]})
        shared = ids if shared is None else shared[len(shared) - _common_end(shared, ids) :]
    assert shared is not None
    return shared


def _common_end(left: IntArray, right: IntArray) -> int:
    n = min(len(left), len(right))
    if n == 0:
        return 0
    differs = np.flatnonzero(left[::-1][:n] != right[::-1][:n])
    return int(differs[0]) if len(differs) else n


def _ends_with(expected: IntArray, end: int, tail: IntArray) -> bool:
    """Whether `expected` is the rest of an answer without `end`, then `end`, then `tail`."""
    cut = len(expected) - len(tail) - 1
    if cut < 0 or expected[cut] != end or not np.array_equal(expected[cut + 1 :], tail):
        return False
    return not np.any(expected[:cut] == end)


async def _tools_do_not_matter(render: Render, end: int | None, call_end: int | None) -> bool:
    """Whether tails are the same when tools are left out of the stub."""
    bare = TemplateFacts(end, call_end, splices=True, splices_tools=True, stub_needs_tools=False)
    full = TemplateFacts(end, call_end, splices=True, splices_tools=True, stub_needs_tools=True)
    try:
        for new_messages in [_MORE, *([_results(1)] if call_end is not None else [])]:
            with_tools = await render_tail(render, full, new_messages, [_TOOL])
            if not np.array_equal(await render_tail(render, bare, new_messages, [_TOOL]), with_tools):
                return False
    except (EngineRefused, TailError):
        return False
    return True


async def _drops(render: Render, new_messages: Sequence[Message], *, inline: bool) -> bool:
    """Whether it makes no difference what was reasoned in an earlier answer once `new_messages` follow it.

    A refusal says no: nothing was seen to vanish.
    """
    plain: dict[str, Any] = {"role": "assistant", "content": "Four."}
    if new_messages[0]["role"] == "tool":
        plain["tool_calls"] = [tool_call(_IDS[0], "look", "{}")]
    renderings = []
    try:
        for text in _REASONINGS:
            reasoned = {**plain, "reasoning": text, "reasoning_content": text}
            if inline:
                reasoned = {**plain, "content": f"<think>\n{text}\n</think>\n\nFour."}
            renderings.append(await ids_of(render, {"messages": [_ASK, reasoned, *new_messages]}))
    except EngineRefused:
        return False
    return bool(np.array_equal(renderings[0], renderings[1]))
