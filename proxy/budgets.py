"""How long an answer may become, and what ends the run when there is no room left: the tightest of three limits.

Pure: the engine's context, the session's own context budget, and what is left of its generated tokens. An answer that
fills its room is cut there by the engine, so a budget is never exceeded by one turn, and only by turns side by side.
"""

from __future__ import annotations

from dataclasses import dataclass

from turngate.proxy.wire import Budgets

CONTEXT_OVERFLOW = "context_overflow"
CONTEXT_TOKENS = "budget:context_tokens"
GENERATED_TOKENS = "budget:generated_tokens"


@dataclass(frozen=True, slots=True)
class Room:
    """`tokens` are left for an answer; none below 1. `cause` is the flag of a run that needed more."""

    tokens: int
    cause: str

    def cut(self, sampled_tokens: int, finish_reason: str) -> bool:
        """Whether an answer ended because this room was full."""
        return finish_reason == "length" and sampled_tokens >= self.tokens


def room_for(budgets: Budgets, max_model_len: int, prompt_tokens: int, generated_tokens: int) -> Room:
    """The room of the next answer.

    Args:
        max_model_len: the engine's context, in tokens.
        prompt_tokens: length of its prompt; where only the engine knows it, what is known of it.
        generated_tokens: sampled in the session until now.
    """
    rooms = [Room(max_model_len - prompt_tokens, CONTEXT_OVERFLOW)]
    if budgets.max_context_tokens is not None:
        rooms.append(Room(budgets.max_context_tokens - prompt_tokens, CONTEXT_TOKENS))
    if budgets.max_generated_tokens is not None:
        rooms.append(Room(budgets.max_generated_tokens - generated_tokens, GENERATED_TOKENS))
    return min(rooms, key=lambda room: room.tokens)
