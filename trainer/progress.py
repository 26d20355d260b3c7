"""What a launch shows while it runs: a live table on a terminal, a plain line every quarter of a minute elsewhere.

Numbers come from the gateway's `/status` and the trainer's `metrics.jsonl`, so a display can never be ahead of what is
recorded. It must never end a run: a figure that cannot be had is shown as a dash.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from turngate.proxy import wire

LINE_EVERY_S = 15.0
RATE_WINDOW_S = 30.0


@dataclass(frozen=True)
class Snapshot:
    """The figures of one moment; None where not known yet. `tokens_per_s` is over the last half minute."""

    step: int
    steps: int
    in_flight: int
    finished: int
    reward: float | None
    tokens_per_s: float
    staleness: float | None
    version: int | None
    live_versions: int
    breaks: int
    unscorable: int

    def cells(self) -> list[tuple[str, str]]:
        """Name and value of each figure, in the order shown."""
        return [
            ("step", f"{self.step}/{self.steps}"),
            ("in flight", str(self.in_flight)),
            ("rollouts", str(self.finished)),
            ("unscorable", str(self.unscorable)),
            ("reward", _number(self.reward, "{:.3f}")),
            ("tokens/s", f"{self.tokens_per_s:.1f}"),
            ("staleness", _number(self.staleness, "{:.2f}")),
            ("version", "-" if self.version is None else f"{self.version} ({self.live_versions} live)"),
            ("breaks", str(self.breaks)),
        ]


class TokenRate:
    """Tokens a second over a sliding window, from a counter that only grows."""

    def __init__(self, window_s: float = RATE_WINDOW_S) -> None:
        self._window_s = window_s
        self._seen: deque[tuple[float, int]] = deque()

    def add(self, now_s: float, tokens: int) -> float:
        """Take in the counter's value at `now_s` and return the rate."""
        self._seen.append((now_s, tokens))
        while len(self._seen) > 2 and now_s - self._seen[1][0] >= self._window_s:
            self._seen.popleft()
        first_s, first = self._seen[0]
        return (tokens - first) / (now_s - first_s) if now_s > first_s else 0.0


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The trainer's lines so far; one still being written, or cut by a kill, is left out."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return []
    found = []
    for line in text.split("\n")[:-1]:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def snapshot(
    status: wire.Status, metrics: list[dict[str, Any]], policy: str, steps: int, tokens_per_s: float
) -> Snapshot:
    """Put the gateway's and the trainer's figures together."""
    last = metrics[-1] if metrics else {}
    ours = next((entry for entry in status.policies if entry.policy == policy), None)
    return Snapshot(
        step=int(last.get("step", 0)),
        steps=steps,
        in_flight=status.open_rollouts,
        finished=status.finished_rollouts,
        reward=status.reward_mean_last,
        tokens_per_s=tokens_per_s,
        staleness=last.get("staleness_mean"),
        version=ours.version if ours else None,
        live_versions=len(ours.live) if ours else 0,
        breaks=sum(status.breaks.values()),
        unscorable=sum(status.unscorable.values()),
    )


class Display:
    """Shows snapshots and messages; a context, so that a live table is always taken down."""

    def __init__(self, title: str, console: Console | None = None) -> None:
        self._title = title
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._started_s = time.monotonic()
        self._line_at_s = 0.0
        self._live: Live | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.stop()

    def say(self, text: str) -> None:
        """A message that stays."""
        self._console.print(f"{self._clock()} {text}", markup=False)

    def waiting(self, text: str) -> None:
        """A message that is only of interest now and then."""
        if time.monotonic() - self._line_at_s >= LINE_EVERY_S:
            self._line_at_s = time.monotonic()
            self.say(text)

    def show(self, now: Snapshot) -> None:
        """The figures of this moment."""
        if not self._console.is_terminal:
            self.waiting("  ".join(f"{name} {value}" for name, value in now.cells()))
            return
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(self._table(now), refresh=True)

    def stop(self) -> None:
        """Take the live table down; its last state stays on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _table(self, now: Snapshot) -> Table:
        table = Table(title=f"{self._title}  {self._clock()}", title_justify="left")
        cells = now.cells()
        for name, _ in cells:
            table.add_column(name, justify="right")
        table.add_row(*(value for _, value in cells))
        return table

    def _clock(self) -> str:
        elapsed_s = int(time.monotonic() - self._started_s)
        return f"[{elapsed_s // 60:02d}:{elapsed_s % 60:02d}]"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
