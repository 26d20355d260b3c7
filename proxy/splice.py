"""Where a request continues recorded history: the index of one session's turns, matched by meaning.

Harnesses send the whole conversation on every turn; the index finds the deepest recorded turn it continues, so that
only new messages are rendered. It must never call a rewritten history a continuation, nor guess about tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from turngate.proxy.canonical import (
    DIGEST_BYTES,
    START,
    canonical_calls,
    canonical_content,
    canonical_id,
    chain,
    chain_digest,
    iterate_calls,
    message_digest,
    reasoning_kinds,
    same_json,
    tools_digest,
)
from turngate.proxy.turns import BrokenTree, Kind, Turn

Message = Mapping[str, Any]

BREAK_CAUSES: frozenset[str] = frozenset(
    {
        "tools_changed",  # the same history with other tools
        "system_changed",  # a system message differs, what follows is known
        "message_edited",  # a user or tool message differs or was put in, what follows or surrounds it is known
        "tool_call_rewritten",  # an assistant message came back with other tool calls
        "content_edited",  # an assistant message came back with other text
        "turn_dropped",  # a sampled answer is missing from the history
        "no_new_message",  # the request ends with a recorded answer
        "history_compacted",  # a summary that the agent had asked for replaced the history (`labels.compacted`)
    }
)
"""Every `Plan.break_cause` of this module; `tail.append_break` adds `template_drops_reasoning`."""

_SYSTEM_ROLES = frozenset({"system", "developer"})


@dataclass(frozen=True, slots=True)
class Plan:
    """How a request relates to what was recorded.

    `first` is a new root (or one more sample of a root's or a break's very request: then `repeats` names that turn).
    `spliced` continues the whole path of `base`; `new_messages` follow it, at least one. `break` rewrote history:
    `base` is the nearest recorded turn, `new_messages` are all messages, `break_cause` is one of `BREAK_CAUSES`.

    `kept` is the deepest turn whose whole path still stands, `kept_messages` of the request's messages are its own
    (spliced: `kept == base`); a break may be prompted by the path of `kept` and a tail of the messages after it.
    `key` (16 bytes) digests the whole request, tools included; `heads` are the digests of every head of the messages.
    """

    kind: Kind
    base: str | None
    new_messages: Sequence[Message]
    break_cause: str | None
    key: bytes
    repeats: str | None = None
    kept: str | None = None
    kept_messages: int = 0
    messages: Sequence[Message] = field(default=(), repr=False)
    heads: Sequence[bytes] = field(default=(), repr=False)
    tools_key: bytes = b""


@dataclass(slots=True)
class _Node:
    """One recorded head of a history: who passed here last and which message came next then."""

    turn: str
    following: Message | None


@dataclass(frozen=True, slots=True)
class _Recorded:
    """What is known of a recorded turn: the digest its history ends with (response included) and how it began."""

    end: bytes
    tools_key: bytes
    kind: Kind
    base: str | None
    kept_messages: int
    response: Message
    reasoning: frozenset[str]


class HistoryIndex:
    """All recorded histories of one session. Deterministic: the same records in the same order give the same plans."""

    def __init__(self) -> None:
        self._turns: dict[str, _Recorded] = {}
        self._ends: dict[tuple[bytes, bytes], str] = {}
        self._ends_any_tools: dict[bytes, str] = {}
        self._asked: dict[bytes, str] = {}
        self._asked_any_tools: dict[bytes, str] = {}
        self._responses: dict[bytes, str] = {}
        self._calls: dict[str, str] = {}
        self._nodes: dict[bytes, _Node] = {}
        self._last: tuple[Sequence[Message], Sequence[bytes]] = ((), (START,))
        self._last_tools: tuple[Sequence[Message] | None, bytes] = (None, tools_digest(None))

    @classmethod
    def from_turns(cls, turns: Sequence[Turn]) -> HistoryIndex:
        """The index as it was after `turns`, rebuilt from what was stored.

        Raises:
            BrokenTree: a spliced turn's base is missing or later than itself.
        """
        index = cls()
        heads: dict[str, list[bytes]] = {}
        depths: dict[str, list[Message]] = {}
        for turn in sorted(turns, key=lambda turn: turn.seq):
            new, tools_key = list(turn.request.get("messages", ())), tools_digest(turn.request.get("tools"))
            before: list[Message] = []
            keys = [START]
            if turn.kind == "spliced":
                if turn.base is None or turn.base not in depths:
                    raise BrokenTree(f"turn {turn.id} continues {turn.base}, which is not recorded before it")
                base = index._turns[turn.base]
                before, tools_key = [*depths[turn.base], base.response], base.tools_key
                keys = [*heads[turn.base], base.end]
            kept = len(before)
            for message in new:
                keys.append(chain(keys[-1], message))
            heads[turn.id], depths[turn.id] = keys, [*before, *new]
            plan = Plan(
                kind=turn.kind,
                base=turn.base,
                new_messages=new,
                break_cause=turn.break_cause,
                key=_request_key(keys[-1], tools_key),
                kept_messages=kept,
                messages=depths[turn.id],
                heads=keys,
                tools_key=tools_key,
            )
            index.record(turn.id, plan, turn.response)
        return index

    def plan(self, messages: Sequence[Message], tools: Sequence[Message] | None) -> Plan:
        """How this request relates to the recorded turns; costs one digest a message that the last request had not."""
        messages, heads = self._digested(messages)
        tools_key = self._digested_tools(tools)
        depth, kept = self._deepest(heads, tools_key)
        plan = Plan(
            kind="first",
            base=None,
            new_messages=messages,
            break_cause=None,
            key=_request_key(heads[-1], tools_key),
            kept=kept,
            kept_messages=depth,
            messages=messages,
            heads=heads,
            tools_key=tools_key,
        )
        repeats = self._asked.get(plan.key)
        if repeats is not None:
            return self._again(plan, repeats)
        rewritten = self._rewritten(plan)
        if rewritten is not None:
            return replace(plan, kind="break", break_cause=rewritten[0], base=rewritten[1])
        if kept is not None:
            return replace(plan, kind="spliced", base=kept, new_messages=messages[depth:])
        return plan

    def key(self, messages: Sequence[Message], tools: Sequence[Message] | None) -> bytes:
        """`Plan.key` of a request that is planned next: a digest (16 bytes) of messages and tools."""
        return _request_key(self._digested(messages)[1][-1], self._digested_tools(tools))

    def shared(self, messages: Sequence[Message]) -> list[Message]:
        """`messages` with those that the last request began with too, written alike, as that request's own objects.

        A history is then held once, not once more by each request that is being answered.
        """
        found = list(messages)
        for i, (message, known) in enumerate(zip(messages, self._last[0], strict=False)):
            if not (same_json(message, known) and _same_order(message, known)):
                break
            found[i] = known
        return found

    def record(
        self,
        turn_id: str,
        plan: Plan,
        response: Message,
        tools: Sequence[Message] | None = None,
        *,
        kind: Kind | None = None,
    ) -> None:
        """Register a finished turn under its history and its response.

        Args:
            plan: what `plan()` said of its request; it already carries the digest of `tools`.
            response: the assistant message as the client got it.
            kind: what the turn became, where that is not `plan.kind` (a template made a break of a continuation).
        """
        del tools
        became = kind or plan.kind
        digest = message_digest(response)
        end = chain_digest(plan.heads[-1], digest)
        recorded = _Recorded(
            end=end,
            tools_key=plan.tools_key,
            kind=became,
            base=plan.base if became == "spliced" else None,
            kept_messages=plan.kept_messages if became == "spliced" else 0,
            response=response,
            reasoning=self._reasoning_of(plan, became, response),
        )
        self._turns[turn_id] = recorded
        self._ends[end, plan.tools_key] = turn_id
        self._ends_any_tools[end] = turn_id
        self._asked[plan.key] = turn_id
        self._asked_any_tools[plan.heads[-1]] = turn_id
        self._responses[digest] = turn_id
        for call_id, _, _ in iterate_calls(response):
            if canonical_id(call_id):
                self._calls[canonical_id(call_id)] = turn_id
        for head, following in zip(plan.heads, [*plan.messages, response], strict=True):
            self._nodes[head] = _Node(turn_id, following)

    def reasoning(self, turn_id: str) -> frozenset[str]:
        """How the path of a turn carries reasoning since its last user message: any of `field`, `inline`."""
        return self._turns[turn_id].reasoning

    def response(self, turn_id: str) -> Message:
        """The recorded response of a turn."""
        return self._turns[turn_id].response

    def _digested(self, messages: Sequence[Message]) -> tuple[Sequence[Message], Sequence[bytes]]:
        """The messages, those that the last request began with too as it had them, and the digest of every head."""
        before, heads = self._last
        n = 0
        for message, known in zip(messages, before, strict=False):
            if not same_json(message, known):
                break
            n += 1
        messages, keys = [*before[:n], *messages[n:]], list(heads[: n + 1])
        for message in messages[n:]:
            keys.append(chain(keys[-1], message))
        self._last = messages, keys
        return messages, keys

    def _digested_tools(self, tools: Sequence[Message] | None) -> bytes:
        if not same_json(tools, self._last_tools[0]):
            self._last_tools = (tools, tools_digest(tools))
        return self._last_tools[1]

    def _deepest(self, heads: Sequence[bytes], tools_key: bytes) -> tuple[int, str | None]:
        for depth in range(len(heads) - 2, 0, -1):
            turn = self._ends.get((heads[depth], tools_key))
            if turn is not None:
                return depth, turn
        return 0, None

    def _again(self, plan: Plan, repeats: str) -> Plan:
        """One more sample of a recorded request: from the same base, or from a root of its own; never a break."""
        before = self._turns[repeats]
        if before.base is None:
            return replace(plan, repeats=repeats)
        depth = before.kept_messages
        return replace(
            plan,
            kind="spliced",
            base=before.base,
            new_messages=plan.messages[depth:],
            repeats=repeats,
            kept=before.base,
            kept_messages=depth,
        )

    def _rewritten(self, plan: Plan) -> tuple[str, str] | None:
        """Why the request is a break, and of which turn; None when it is not."""
        depth, size = plan.kept_messages, len(plan.messages)
        if plan.heads[-1] in self._ends_any_tools:
            return "no_new_message", self._ends_any_tools[plan.heads[-1]]
        for head in range(size - 1, depth, -1):
            if plan.heads[head] in self._ends_any_tools:
                return "tools_changed", self._ends_any_tools[plan.heads[head]]
        for head in range(size - 1, depth, -1):
            if plan.heads[head] in self._asked_any_tools:
                turn = self._asked_any_tools[plan.heads[head]]
                return self._answer_cause(plan.messages[head:], self._turns[turn].response), turn
        return self._edited(plan)

    def _answer_cause(self, messages: Sequence[Message], response: Message) -> str:
        """What happened to a recorded answer, given the messages that now stand in its place."""
        echoed, digest = messages[0], message_digest(response)
        if echoed.get("role") != "assistant" or message_digest(echoed) in self._responses:
            later = any(message_digest(message) == digest for message in messages[1:])
            return "message_edited" if later and not _is_empty(response) else "turn_dropped"
        if canonical_calls(echoed) != canonical_calls(response):
            return "tool_call_rewritten"
        return "content_edited"

    def _edited(self, plan: Plan) -> tuple[str, str] | None:
        """A break because a message before or between known answers differs, else None."""
        evidence = self._known_answer(plan.messages[plan.kept_messages :])
        known = max(i for i in range(len(plan.heads)) if i == 0 or plan.heads[i] in self._nodes)
        if known == len(plan.messages):
            return None
        node, message = self._nodes.get(plan.heads[known]), plan.messages[known]
        if evidence is None:
            if plan.kept is None and node is not None and _adds_to(node.following, message, plan.messages):
                return "message_edited", node.turn
            return None
        roles = {message.get("role"), (node.following or {}).get("role") if node else None}
        cause = "system_changed" if roles & _SYSTEM_ROLES else "message_edited"
        return cause, node.turn if node is not None and known > 0 else evidence

    def _known_answer(self, messages: Sequence[Message]) -> str | None:
        """The last recorded turn whose answer is among `messages`, by its meaning or by a tool-call id."""
        for message in reversed(messages):
            if message.get("role") != "assistant" or _is_empty(message):
                continue
            turn = self._responses.get(message_digest(message))
            if turn is not None:
                return turn
            for call_id, _, _ in iterate_calls(message):
                if canonical_id(call_id) in self._calls:
                    return self._calls[canonical_id(call_id)]
        return None

    def _reasoning_of(self, plan: Plan, kind: Kind, response: Message) -> frozenset[str]:
        kinds = set(reasoning_kinds(response))
        users = [i for i, message in enumerate(plan.messages) if message.get("role") == "user"]
        since_user = plan.messages[users[-1] if users else 0 :]
        if kind == "spliced" and plan.base is not None:
            if not any(message.get("role") == "user" for message in plan.new_messages):
                kinds |= self._turns[plan.base].reasoning
            since_user = since_user[-len(plan.new_messages) :]
        for message in since_user:
            if message.get("role") == "assistant":
                kinds |= reasoning_kinds(message)
        return frozenset(kinds)


def _request_key(head: bytes, tools_key: bytes) -> bytes:
    return blake2b(head + tools_key, digest_size=DIGEST_BYTES).digest()


def _same_order(one: Any, other: Any) -> bool:
    """Whether the keys of two equal JSON values stand in the same order: a template may print them."""
    if type(one) is dict:
        return list(one) == list(other) and all(_same_order(value, other[key]) for key, value in one.items())
    if type(one) is list:
        return all(map(_same_order, one, other))
    return True


def _is_empty(message: Message) -> bool:
    return canonical_content(message.get("content")) is None and not canonical_calls(message)


def _adds_to(recorded: Message | None, message: Message, messages: Sequence[Message]) -> bool:
    """Whether a conversation without answers so far repeats a recorded user message with a note before or after it."""
    if recorded is None or any(one.get("role") == "assistant" for one in messages):
        return False
    if recorded.get("role") != "user" or message.get("role") != "user":
        return False
    old, new = canonical_content(recorded.get("content")), canonical_content(message.get("content"))
    if not isinstance(old, str) or not isinstance(new, str) or old == new:
        return False
    return new.startswith(old) or new.endswith(old)
