"""A teacher's answer as the student's tokens: what the engine's template writes for it, cut exactly out of a rendering.

Rendered whole, history and all, so that nothing is assumed about templates: the rendering must begin with the very
prompt, and ends with the end-of-turn token. What does not fit is refused; no id is ever guessed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from turngate.proxy.ask import Ask
from turngate.proxy.engine.errors import EngineRefused
from turngate.proxy.errors import BadRequest
from turngate.proxy.prompting import renderable
from turngate.proxy.tail import Render, TemplateFacts, ids_of
from turngate.proxy.teachers import Told
from turngate.proxy.turns import IntArray

APART = "rendered_apart"
"""Flag of a demonstration whose answer was cut from a short rendering: the whole one does not hold its prompt."""

_ASIDE: Mapping[str, Any] = {"role": "user", "content": "Hi"}


class NotImitable(BadRequest):
    """The student's chat template cannot write this answer."""

    code = "not_imitable"


async def completion_ids(
    render: Render, facts: TemplateFacts, ask: Ask, prompt: IntArray, told: Told, *, check_calls: bool
) -> tuple[IntArray, tuple[str, ...]]:
    """The answer's ids after `prompt: int32[P]`, the end-of-turn token last (not where it was cut), and flags.

    Args:
        render: ids of a chat-completions body.
        check_calls: also see that the template writes tool calls at all.

    Raises:
        NotImitable: the template does not write this answer behind this prompt. EngineError: the engine is away.
    """
    end = facts.end_of_turn
    if end is None:
        raise NotImitable("no token ends every answer of the student's chat template, so none can be demonstrated")
    message = {**told.message, "content": told.message["content"] or ""}
    flags: tuple[str, ...] = ()
    found = await _written(render, ask, ask.messages, prompt, message, end)
    if found is None:
        aside = await ids_of(render, _body(ask, [_ASIDE]))
        found, flags = await _written(render, ask, [_ASIDE], aside, message, end), (APART,)
    if found is None:
        raise NotImitable("the student's chat template does not write this answer where its generation begins")
    if check_calls and message.get("tool_calls"):
        mute = {key: value for key, value in message.items() if key != "tool_calls"}
        aside = await ids_of(render, _body(ask, [_ASIDE]))
        silent = await _written(render, ask, [_ASIDE], aside, mute, end)
        if silent is not None and np.array_equal(found, silent):
            raise NotImitable(
                "the student's chat template writes no tool calls, so they cannot be demonstrated: take a model whose "
                "template knows tools, or an agent that calls them in text"
            )
    return (found[:-1] if told.cut else found), flags


async def _written(
    render: Render,
    ask: Ask,
    history: Sequence[Mapping[str, Any]],
    prompt: IntArray,
    message: Mapping[str, Any],
    end: int,
) -> IntArray | None:
    """What stands between `prompt` and the last end-of-turn token of the rendering, that token included."""
    try:
        whole = await ids_of(render, {**_body(ask, [*history, message]), "add_generation_prompt": False})
    except EngineRefused as error:
        raise NotImitable(f"the student's engine cannot render this answer: {error}") from error
    ends = np.flatnonzero(whole == end)
    if not len(ends) or int(ends[-1]) < len(prompt) or not np.array_equal(whole[: len(prompt)], prompt):
        return None
    return whole[len(prompt) : int(ends[-1]) + 1].copy()


def _body(ask: Ask, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": [renderable(message) for message in messages]}
    if ask.tools:
        body["tools"] = list(ask.tools)
    return body
