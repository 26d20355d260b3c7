"""Labels: which part of the harness is speaking in a turn, and how we know.

Training takes `main` only, unless the rollout says otherwise, so every label carries its reason and can be doubted.
Structure and native marks decide; texts are never searched for phrases.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from turngate.proxy.canonical import START, canonical_content, chain, iterate_calls, tools_digest
from turngate.proxy.splice import Plan
from turngate.proxy.turns import Label, Turn

Message = Mapping[str, Any]

PARENT_HEADERS: Mapping[str, str] = {
    "x-parent-session-id": "x-session-id",
    "x-claude-code-agent-id": "x-claude-code-agent-id",
    "x-codex-parent-thread-id": "thread-id",
}
"""Request headers that only subagents send (OpenCode, Claude Code, Codex) -> the header with the subagent's own id."""

SESSION_HEADERS: tuple[str, ...] = ("x-session-id", "x-claude-code-session-id", "thread-id", "session-id")
"""Headers in which harnesses name the conversation that speaks."""

CODEX_METADATA = "x-codex-turn-metadata"
"""The header in which Codex says, as JSON, what a request is for: `request_kind` is `turn` or `compaction`."""

CLAUDE_COMPACTION_BETA = "fallback-credit-"
"""How the beta begins that Claude Code 2.1.332 names in `anthropic-beta` when it asks for a summary, and only then."""

MIN_QUOTE_CHARS = 4
"""Shorter texts are in anything."""

_MARKUP = re.compile(r"</?[A-Za-z][\w-]*>")


@dataclass(frozen=True, slots=True)
class Speaker:
    """Who speaks in a turn. `agent` is the harness's own id of the conversation, None where it sends none; `parent`
    the recorded turn that started a subagent's conversation, None where it is not known."""

    label: Label
    reason: str
    agent: str | None = None
    parent: str | None = None


@dataclass(frozen=True, slots=True)
class Root:
    """What a main conversation of the session began with: its system messages, its tools, and whether it had any."""

    system_key: bytes
    tools_key: bytes
    has_tools: bool


def main_roots(turns: Mapping[str, Turn]) -> tuple[Root, ...]:
    """The main conversations of a session so far, oldest first."""
    roots = [
        root_of(turn.request.get("messages", ()), turn.request.get("tools"))
        for turn in sorted(turns.values(), key=lambda turn: turn.seq)
        if turn.label == "main" and turn.kind == "first"
    ]
    return tuple(dict.fromkeys(roots))


def root_of(messages: Sequence[Message], tools: Sequence[Message] | None) -> Root:
    """The root that a request would begin."""
    key = START
    for message in messages:
        if message.get("role") not in ("system", "developer"):
            break
        key = chain(key, message)
    return Root(key, tools_digest(tools), bool(tools))


def speaker(
    messages: Sequence[Message],
    tools: Sequence[Message] | None,
    headers: Mapping[str, str],
    turns: Mapping[str, Turn],
    plan: Plan,
    *,
    main_tools: bool | None = None,
    formed: bool = False,
) -> Speaker:
    """Who is speaking in a request.

    Args:
        headers: of the HTTP request; names in any case.
        turns: the session's recorded turns by id.
        plan: how the request continues them.
        main_tools: whether the main conversation offers tools, where that is known before it was recorded.
        formed: whether the answer must have a given form, such as a JSON schema: then a program reads it.
    """
    sent = {name.lower(): value for name, value in headers.items() if value}
    before = turns.get(plan.base or plan.repeats or "")
    agent = next((sent[name] for name in SESSION_HEADERS if name in sent), None)
    if _request_kind(sent.get(CODEX_METADATA)) == "compaction":
        return Speaker("compaction", f"header {CODEX_METADATA}", agent)
    if before is not None and "x-claude-code-session-id" in sent and _asks_for_summary(sent.get("anthropic-beta", "")):
        reason = f"a recorded history, with the beta {CLAUDE_COMPACTION_BETA}…"
        return Speaker("compaction", reason, sent.get("x-claude-code-agent-id", agent), before.parent)
    for mark, own in PARENT_HEADERS.items():
        if mark in sent:
            known = before.parent if before is not None and before.agent == sent.get(own) else None
            parent = known or _started_by(sent.get(mark if mark != own else "x-claude-code-session-id"), turns)
            return Speaker("subagent", f"header {mark}", sent.get(own), parent)
    if plan.kind == "break":  # what follows a compaction is no compaction, though it was the last to pass there
        before = _own(_at_work(before, turns), agent, turns)
        if before is not None and not tools and _offered_tools(before, turns):
            if formed:
                return Speaker("side", "a recorded history without its tools, for an answer of a given form", agent)
            return Speaker("compaction", "a recorded history without its tools", agent)
    if before is not None:
        reason = "continues its base" if plan.base else "repeats a request"
        return Speaker(before.label, reason, agent, before.parent)
    label, reason = _root_label(root_of(messages, tools), main_roots(turns), main_tools)
    if label == "side" and _quotes(messages, turns):
        label, reason = "compaction", "no tools, and it quotes what the main conversation answered"
    return Speaker(label, reason, agent)


def settled(turns: Sequence[Turn]) -> list[Turn]:
    """All turns of a rollout, with the labels that they would have had if their order had been another.

    A conversation without tools that begins before the main one with tools (a title, a probe) looks like the main one
    when its turn is kept; seen from the end it is as much a side call as one that comes later.
    """
    roots: dict[str, str] = {}
    with_tools: set[str] = set()
    for turn in sorted(turns, key=lambda turn: turn.seq):
        roots[turn.id] = roots.get(turn.base or "", turn.id)
        if turn.label == "main" and turn.request.get("tools"):
            with_tools.add(roots[turn.id])
    if not with_tools:
        return list(turns)
    reason = "no tools beside a main conversation with tools, which came later"
    return [
        replace(turn, label="side", label_reason=reason)
        if turn.label == "main" and roots[turn.id] not in with_tools
        else turn
        for turn in turns
    ]


def compacted(messages: Sequence[Message], turns: Mapping[str, Turn]) -> Turn | None:
    """The recorded compaction whose answer stands in `messages`: then it replaced the history before it.

    Of an answer in marked-up parts the last one counts: Claude Code keeps the summary and drops the analysis.
    """
    texts = [canonical_content(message.get("content")) for message in messages if message.get("role") != "tool"]
    for turn in turns.values():
        answer = canonical_content(turn.response.get("content"))
        if turn.label == "compaction" and isinstance(answer, str):
            parts = [part for one in _MARKUP.split(answer) if len(part := one.strip()) >= MIN_QUOTE_CHARS]
            if any(isinstance(text, str) and quoted in text for quoted in [answer, *parts[-1:]] for text in texts):
                return turn
    return None


def after_compaction(plan: Plan, turns: Mapping[str, Turn]) -> Plan:
    """`plan` with its cause, where a recorded compaction's answer replaced the history: a break, whatever is left.

    A request that begins anew is one only if the compaction continued the history that it summed up.
    """
    if plan.kind == "spliced" or plan.repeats is not None or (done := compacted(plan.messages, turns)) is None:
        return plan
    if plan.kind == "break":
        return replace(plan, break_cause="history_compacted")
    before = _at_work(done, turns)
    return plan if before is None else replace(plan, kind="break", break_cause="history_compacted", base=before.id)


def _at_work(turn: Turn | None, turns: Mapping[str, Turn]) -> Turn | None:
    """The turn itself, or else the one whose history it was about: neither a compaction nor a side call."""
    while turn is not None and turn.label in ("compaction", "side"):
        turn = turns.get(turn.base or "")
    return turn


def _own(turn: Turn | None, agent: str | None, turns: Mapping[str, Turn]) -> Turn | None:
    """The turn, or the last one at work of the conversation that `agent` names, where the turn is another one's.

    Two conversations may begin alike once both are summed up, so that one passes where the other did.
    """
    if turn is None or agent is None or turn.agent in (None, agent):
        return turn
    own = [one for one in turns.values() if one.agent == agent and one.label not in ("compaction", "side")]
    return max(own, key=lambda one: one.seq, default=None)


def _offered_tools(turn: Turn | None, turns: Mapping[str, Turn]) -> bool:
    """Whether the conversation of a turn offered tools."""
    while turn is not None and turn.kind == "spliced":
        turn = turns.get(turn.base or "")
    return turn is not None and bool(turn.request.get("tools"))


def _asks_for_summary(betas: str) -> bool:
    return any(beta.strip().startswith(CLAUDE_COMPACTION_BETA) for beta in betas.split(","))


def _root_label(root: Root, mains: Sequence[Root], main_tools: bool | None) -> tuple[Label, str]:
    """The label of a new root beside the main roots so far."""
    with_tools = any(main.has_tools for main in mains)
    if root.has_tools:
        if root in mains:
            return "main", "begins like the main conversation"
        if with_tools:
            return "subagent", "other system or tools than main"
        return "main", "first root with tools" if mains else "first request with tools"
    if with_tools or main_tools:
        return "side", "no tools beside a main conversation with tools"
    if not mains:
        return "main", "first request"
    return ("main", "begins like the main conversation") if root in mains else ("side", "other system than main")


def _request_kind(metadata: str | None) -> object:
    """What Codex says a request is for; None where it says nothing."""
    try:
        found = orjson.loads(metadata or "null")
    except orjson.JSONDecodeError:
        return None
    return found.get("request_kind") if isinstance(found, dict) else None


def _started_by(agent: str | None, turns: Mapping[str, Turn]) -> str | None:
    """The last turn of the conversation `agent` that called a tool: what it called started the subagent."""
    for turn in sorted(turns.values(), key=lambda turn: turn.seq, reverse=True):
        if agent is not None and turn.agent == agent and turn.response.get("tool_calls"):
            return turn.id
    return None


def _quotes(messages: Sequence[Message], turns: Mapping[str, Turn]) -> bool:
    """Whether most of what the main conversation answered stands in the texts of `messages`."""
    texts = [text for message in messages if isinstance(text := canonical_content(message.get("content")), str)]
    answers = [list(_said(turn.response)) for turn in turns.values() if turn.label == "main"]
    said = [pieces for pieces in answers if pieces]
    quoted = sum(any(piece in text for piece in pieces for text in texts) for pieces in said)
    return bool(said) and 2 * quoted >= len(said)


def _said(response: Message) -> Iterator[str]:
    """What an answer says: its text, and the texts among its tools' arguments."""
    content = canonical_content(response.get("content"))
    texts = [content] if isinstance(content, str) else []
    for _, _, arguments in iterate_calls(response):
        try:
            found = orjson.loads(arguments) if isinstance(arguments, str) else arguments
        except orjson.JSONDecodeError:
            continue
        texts += [value for value in found.values() if isinstance(value, str)] if isinstance(found, dict) else []
    yield from (text for text in texts if len(text) >= MIN_QUOTE_CHARS)
