"""How many tokens an engine gathers in an event: as many as are sampled in the time that the agent's reading allows.

Each event costs both sides about as much as any other, so fewer are cheaper; it must never delay text noticeably.
"""

from __future__ import annotations

from turngate.proxy.turns import Turn

STREAMED_S, STREAMED_TOKENS = 0.5, 64
"""Where the agent streams: an event holds what the session's turn before sampled in that time, at most so many.

The time is the setting `stream_s`; 0 makes each token an event.
"""

WHOLE_S, WHOLE_TOKENS = 2.0, 256
"""The same where the agent waits for the whole answer; often enough to end the turns of a finished rollout soon."""

UNKNOWN_TOKENS_PER_S = 32.0
"""How fast a session's first turn is taken to be where the agent waits for the whole answer."""

FIRST_TURN_SHARE = 0.5
"""Where it streams: this part of the pace of another session's last turn, since nothing says it will be as fast."""

_TELLING_TOKENS, _TELLING_S = 32, 0.25


class Pace:
    """The pace of a gateway's turns; the event loop is the only user."""

    def __init__(self, streamed_s: float = STREAMED_S) -> None:
        self._streamed_s = streamed_s
        self._last_tokens_per_s = 0.0

    def saw(self, turn: Turn) -> None:
        """Learn from a sampled turn that was long enough to tell."""
        if len(turn.completion_ids) >= _TELLING_TOKENS and _sampling_s(turn) >= _TELLING_S:
            self._last_tokens_per_s = _tokens_per_s(turn)

    def interval_tokens(self, last: Turn | None, *, stream: bool) -> int:
        """Tokens an event may gather; `last` is the session's turn before, None for its first."""
        if last is not None:
            tokens_per_s = _tokens_per_s(last)
        else:
            tokens_per_s = self._last_tokens_per_s * FIRST_TURN_SHARE if stream else UNKNOWN_TOKENS_PER_S
        interval_s, most = (self._streamed_s, STREAMED_TOKENS) if stream else (WHOLE_S, WHOLE_TOKENS)
        return max(1, min(most, int(tokens_per_s * interval_s)))


def _sampling_s(turn: Turn) -> float:
    return (turn.timings.done_ns - turn.timings.first_token_ns) / 1e9


def _tokens_per_s(turn: Turn) -> float:
    sampling_s = _sampling_s(turn)
    return len(turn.completion_ids) / sampling_s if sampling_s > 0 else 0.0
