"""Counters of what passed the gate since the start, rendered in Prometheus' text format at `/metrics`.

Kept tiny and in memory: the durable truth is the store. Every name is documented in `docs/metrics.md`.
"""

from __future__ import annotations

from collections import Counter

from turngate.proxy.turns import Turn

HELP = {
    "turngate_turns_total": "turns committed, by kind",
    "turngate_breaks_total": "breaks, by cause",
    "turngate_prompt_tokens_total": "prompt tokens of committed turns",
    "turngate_rendered_tokens_total": "prompt tokens that had to be rendered (tails and whole prompts)",
    "turngate_completion_tokens_total": "sampled tokens of committed turns",
    "turngate_refusals_total": "requests refused, by code",
    "turngate_cancelled_total": "turns whose client went away before the end",
}

GAUGES = {
    "turngate_open_sessions": "sessions used since the start and not finished",
    "turngate_healthy_engines": "engines that answered their last health check",
}


class Metrics:
    """All counters; the event loop is the only writer."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()

    def turn(self, turn: Turn) -> None:
        """Count a committed turn."""
        self._add("turngate_turns_total", f'{{kind="{turn.kind}"}}')
        if turn.break_cause:
            self._add("turngate_breaks_total", f'{{cause="{turn.break_cause}"}}')
        self._add("turngate_prompt_tokens_total", "", turn.prompt_tokens)
        self._add("turngate_rendered_tokens_total", "", len(turn.tail_ids))
        self._add("turngate_completion_tokens_total", "", len(turn.completion_ids))

    def refusal(self, code: str) -> None:
        """Count a refused request."""
        self._add("turngate_refusals_total", f'{{code="{code}"}}')

    def cancelled(self) -> None:
        """Count a turn that its client left."""
        self._add("turngate_cancelled_total", "")

    def text(self, gauges: dict[str, float]) -> str:
        """The exposition, counters and the given gauges."""
        lines: list[str] = []
        for name, words in HELP.items():
            lines += [f"# HELP {name} {words}", f"# TYPE {name} counter"]
            samples = sorted((labels, value) for (n, labels), value in self._counts.items() if n == name)
            lines += [f"{name}{labels} {value}" for labels, value in samples]
        for name, number in gauges.items():
            lines += [f"# HELP {name} {GAUGES[name]}", f"# TYPE {name} gauge", f"{name} {number}"]
        return "\n".join(lines) + "\n"

    def _add(self, name: str, labels: str, amount: int = 1) -> None:
        self._counts[name, labels] += amount
