"""Labels: which part of the harness is speaking in a turn, and how we know.

Training takes `main` only, so every label carries its reason and can be doubted. Structure and native marks decide;
texts are never searched for phrases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turngate.proxy.canonical import START, chain, tools_digest
from turngate.proxy.splice import Plan
from turngate.proxy.turns import Label, Turn

Message = Mapping[str, Any]

SUBAGENT_HEADERS: tuple[str, ...] = (
    "x-parent-session-id",
    "x-claude-code-agent-id",
    "x-codex-parent-thread-id",
)
"""Request headers that only subagents send (OpenCode, Claude Code, Codex)."""


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


def label(
    messages: Sequence[Message],
    tools: Sequence[Message] | None,
    headers: Mapping[str, str],
    turns: Mapping[str, Turn],
    plan: Plan,
) -> tuple[Label, str]:
    """The label of a request and the reason for it.

    Args:
        headers: of the HTTP request; names in any case.
        turns: the session's recorded turns by id.
        plan: how the request continues them.
    """
    names = {name.lower() for name, value in headers.items() if value}
    for mark in SUBAGENT_HEADERS:
        if mark in names:
            return "subagent", f"header {mark}"
    before = turns.get(plan.base or plan.repeats or "")
    if before is not None and plan.break_cause == "tools_changed" and not tools:
        return "compaction", "a recorded history without its tools"
    if before is not None:
        return before.label, "continues its base" if plan.base else "repeats a request"
    return _root_label(root_of(messages, tools), main_roots(turns))


def _root_label(root: Root, mains: Sequence[Root]) -> tuple[Label, str]:
    """The label of a new root beside the main roots so far."""
    if not mains:
        return "main", "first request"
    if root in mains:
        return "main", "begins like the main conversation"
    with_tools = any(main.has_tools for main in mains)
    if root.has_tools:
        return ("subagent", "other system or tools than main") if with_tools else ("main", "first root with tools")
    return "side", "no tools beside a main conversation with tools" if with_tools else "other system than main"
