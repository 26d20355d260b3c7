"""Small inline SVG shapes: numbers in, coordinates out, drawn by the templates.

Inline SVG needs no script and no other host. Coordinates are numbers that we computed; nothing a model wrote gets here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from turngate.proxy.wire import AdapterInfo, RolloutInfo


@dataclass(frozen=True, slots=True)
class Line:
    """A line chart: `points` and `area` for polyline and path, `ticks` as (x, words), and the range of values."""

    width: int
    height: int
    points: str
    area: str
    ticks: tuple[tuple[float, str], ...]
    low: float
    high: float
    last: tuple[float, float]


def reward_line(
    rollouts: Sequence[RolloutInfo],
    adapters: Sequence[AdapterInfo | None],
    *,
    window: int = 32,
    width: int = 600,
    height: int = 96,
) -> Line | None:
    """Rolling mean reward over finished scored rollouts, in order; None for fewer than two.

    x is the count of scored rollouts, so pauses take no room; a tick stands where an adapter version was published.
    """
    scored = sorted(
        (info.finished_at_ns or info.created_at_ns, info.reward)
        for info in rollouts
        if info.outcome == "scored" and info.reward is not None
    )
    if len(scored) < 2:
        return None
    rewards = [reward for _, reward in scored]
    means = [fmean(rewards[max(0, n + 1 - window) : n + 1]) for n in range(len(rewards))]
    step = max(1, len(means) // width)
    kept = [*range(0, len(means), step), len(means) - 1]
    low, high = min(0.0, *means), max(*means, 1e-9)
    spread = (high - low) or 1.0
    pad = 4.0

    def x(n: float) -> float:
        return round(n / (len(means) - 1) * width, 1)

    def y(value: float) -> float:
        return round(height - pad - (value - low) / spread * (height - 2 * pad), 1)

    points = " ".join(f"{x(n)},{y(means[n])}" for n in kept)
    ticks = []
    for info in adapters:
        if info is not None:
            before = sum(at_ns <= info.published_at_ns for at_ns, _ in scored)
            ticks.append((x(min(before, len(means) - 1)), f"v{info.version} published after {before} scored rollouts"))
    area = f"M0,{height} L{points.replace(' ', ' L')} L{width},{height} Z"
    return Line(width, height, points, area, tuple(ticks), low, high, (x(len(means) - 1), y(means[-1])))


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: `x`, `y`, `width`, `height` in the chart's units, a class for its colour, and words for hovering."""

    x: float
    y: float
    width: float
    height: float
    kind: str
    words: str


def surprise_bars(logprobs: Sequence[float], buckets: Sequence[int], width: int = 800, height: int = 40) -> list[Bar]:
    """One bar a token, as tall as its surprise (cut at 8 nats); many tokens are merged to the worst of each bar."""
    most = 400
    step = max(1, -(-len(logprobs) // most))
    bars = []
    count = -(-len(logprobs) // step)
    for n in range(count):
        start = n * step
        worst = min(range(start, min(start + step, len(logprobs))), key=lambda place: logprobs[place])
        tall = max(1.0, min(8.0, -logprobs[worst]) / 8.0 * height)
        one = width / count
        bars.append(
            Bar(
                round(n * one, 2),
                round(height - tall, 2),
                round(max(0.6, min(one * 0.86, 14)), 2),
                round(tall, 2),
                f"lp{buckets[worst]}",
                f"token {worst}: {logprobs[worst]:.3f}",
            )
        )
    return bars
