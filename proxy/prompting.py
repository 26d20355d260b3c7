"""From an ask to prompt tokens: splice where the recorded history continues, render anew where it was rewritten.

This is the one place that decides which tokens a turn is sampled from, so exactness is decided here: a prompt is
either recorded tokens plus a rendered tail, or a whole rendering that is honestly called a break.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import orjson

from turngate.proxy.ask import Ask
from turngate.proxy.engine.errors import EngineRefused
from turngate.proxy.engine.failover import SessionEngines
from turngate.proxy.engine.types import Rendered
from turngate.proxy.sessions import Session
from turngate.proxy.splice import Plan
from turngate.proxy.tail import Render, StubCounts, TailError, TemplateFacts, append_break, render_tail
from turngate.proxy.turns import IntArray, Kind, Turn, path_ids

NOT_SPLICEABLE = "template_not_spliceable"
"""Break cause: the template's tails cannot be rendered behind a stub, so the history was rendered anew."""

NEED_TOOLS = frozenset({"tool_choice", "parallel_tool_calls"})
"""Keys an engine refuses in a request without tools, which a stub's is."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """`ids: int32[P]` is the whole prompt: `base_tokens` ids of `base`'s path, then `tail_ids: int32[T]`."""

    ids: IntArray
    kind: Kind
    base: str | None
    base_tokens: int
    tail_ids: IntArray
    break_cause: str | None
    new_messages: Sequence[Mapping[str, Any]]
    engine_defaults: Mapping[str, Any]
    extra: Mapping[str, Any]


async def build_prompt(
    engines: SessionEngines, facts: TemplateFacts, stubs: StubCounts, session: Session, ask: Ask, plan: Plan
) -> Prompt:
    """The prompt of one turn.

    Raises:
        EngineError: the engine refused to render, or is away.
    """
    renders: list[Rendered] = []

    async def render(body: Mapping[str, Any]) -> IntArray:
        kept = ask.render_body.items()
        about = {key: value for key, value in kept if "tools" in body or key not in NEED_TOOLS}
        renders.append(await engines.render({**about, **body}))
        return renders[-1].ids

    kept = plan.base if plan.kind == "spliced" else plan.kept
    cause = plan.break_cause
    if plan.kind != "first" and kept is not None:
        onward = replace(plan, kind="spliced", base=kept, new_messages=plan.messages[plan.kept_messages :])
        faithful = append_break(facts, session.index, onward) if session.new.history == "template" else None
        tail = await _tail(render, facts, stubs, ask, session.turns[kept], onward) if faithful is None else None
        if tail is not None:
            whole = path_ids(session.turns, session.turns[kept])
            return Prompt(
                ids=np.concatenate([whole, tail]).astype(np.int32, copy=False),
                kind=plan.kind,
                base=kept,
                base_tokens=len(whole),
                tail_ids=tail,
                break_cause=cause,
                new_messages=plan.new_messages,
                engine_defaults=renders[-1].sampling_params,
                extra=renders[-1].extra,
            )
        cause = cause or faithful or NOT_SPLICEABLE
    body = {"messages": [renderable(message) for message in ask.messages]}
    if ask.tools:
        body["tools"] = list(ask.tools)
    ids = await render(body)
    return placed(session, ids, plan, cause, ask.messages, renders[-1].sampling_params, renders[-1].extra)


async def _tail(
    render: Render, facts: TemplateFacts, stubs: StubCounts, ask: Ask, base: Turn, plan: Plan
) -> IntArray | None:
    """The tokens that the messages after `base` add; None where only a whole rendering can tell."""
    if not facts.takes(plan.new_messages):
        return None
    if ask.render_body.get("tool_choice", "auto") not in ("auto", "none"):
        facts = replace(facts, stub_needs_tools=True)  # a forced choice becomes a grammar only beside its tools
    end = facts.end_after(plan.new_messages)
    try:
        return await render_tail(
            render,
            facts,
            [renderable(message) for message in plan.new_messages],
            ask.tools,
            template_kwargs=ask.render_body.get("chat_template_kwargs"),
            cut=not len(base.completion_ids) or int(base.completion_ids[-1]) != end,
            response=base.response,
            stubs=stubs,
            context=ask.render_body,
        )
    except (EngineRefused, TailError):
        return None


def renderable(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """`message` as an engine can render it: tool arguments that are not a JSON object become one around their text.

    Agents echo a sampled call with broken JSON verbatim, engines answer such a history with a 400, and many agents
    then repeat it without end. Only whole renderings need this: a spliced history is never rendered.
    """
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_with_object_arguments(call) for call in calls]}


def _with_object_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        if isinstance(orjson.loads(function["arguments"]), dict):
            return call
    except orjson.JSONDecodeError:
        pass
    wrapped = orjson.dumps({"raw": function["arguments"]}).decode()
    return {**call, "function": {**function, "arguments": wrapped}}


def placed(
    session: Session,
    ids: IntArray,
    plan: Plan,
    cause: str | None,
    messages: Sequence[Mapping[str, Any]],
    engine_defaults: Mapping[str, Any],
    extra: Mapping[str, Any],
) -> Prompt:
    """A wholly rendered prompt set into the session's tree by its longest token prefix."""
    base, shared = _nearest(session.turns, ids) if plan.kind != "first" else (None, 0)
    if base is not None and base.id == plan.base and shared == base.path_tokens and plan.kind == "spliced":
        kind: Kind = "spliced"
        cause, messages = None, plan.new_messages
    else:
        kind = "first" if plan.kind == "first" else "break"
        cause = None if kind == "first" else cause or "history_rewritten"
    return Prompt(
        ids=ids,
        kind=kind,
        base=base.id if base is not None else None,
        base_tokens=shared,
        tail_ids=ids[shared:],
        break_cause=cause,
        new_messages=messages,
        engine_defaults=engine_defaults,
        extra=extra,
    )


def _nearest(turns: Mapping[str, Turn], ids: IntArray) -> tuple[Turn | None, int]:
    """The recorded turn whose path shares the longest head with `ids`, and how many tokens that is."""
    best: Turn | None = None
    best_shared = 0
    for turn in turns.values():
        path = path_ids(turns, turn)
        n = min(len(path), len(ids))
        differs = np.flatnonzero(path[:n] != ids[:n])
        shared = int(differs[0]) if len(differs) else n
        if shared > best_shared:
            best, best_shared = turn, shared
    return best, best_shared
