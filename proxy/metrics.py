"""What passed the gate since the start, as counters and histograms in Prometheus' text format at `/metrics`.

Kept tiny and in memory: the durable truth is the store. Every name is documented in `docs/metrics.md`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass

from turngate.proxy.turns import Turn

HELP = {
    "turngate_turns_total": "turns committed, by kind",
    "turngate_breaks_total": "breaks, by cause",
    "turngate_prompt_tokens_total": "prompt tokens of committed turns",
    "turngate_rendered_tokens_total": "prompt tokens that had to be rendered (tails and whole prompts)",
    "turngate_completion_tokens_total": "sampled tokens of committed turns",
    "turngate_refusals_total": "requests and connections refused or cut off, by code",
    "turngate_idle_sessions_total": "sessions closed because nothing was asked of them for session_idle_s",
    "turngate_cancelled_total": "turns ended because their clients went away and none asked again in time",
    "turngate_reattached_total": "requests that were told the answer of an equal one, instead of a new sample",
    "turngate_runs_ended_total": "requests answered with a run's last words, because it is over, by cause",
    "turngate_engine_errors_total": "turns that an engine failed or refused, by kind of error",
    "turngate_failovers_total": "calls that an engine failed and that were made again, by that engine",
    "turngate_continuations_total": "answers gone on with from their tokens so far, by the engine that died",
    "turngate_admission_waits_total": "turns that had to wait for a full engine, by engine",
    "turngate_admission_refusals_total": "turns that found an engine full for longer than they may wait, by engine",
}

LONG_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
SHORT_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)

HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "turngate_turn_seconds": ("committed turns: from the whole request to the commit", LONG_S),
    "turngate_first_token_seconds": ("committed turns: from the request to the engine's first token", LONG_S),
    "turngate_overhead_seconds": (
        "committed turns: time outside of the engine's generation, which is planning, rendering and commit",
        SHORT_S,
    ),
    "turngate_derender_seconds": ("committed turns: time spent turning sampled tokens into the answer", SHORT_S),
    "turngate_commit_seconds": ("committed turns: waiting for the store's commit", SHORT_S),
    "turngate_loop_lag_seconds": ("how late the event loop ran a timer, looked at twice a second", SHORT_S),
}

GAUGES = {
    "turngate_workers": "processes that serve agents, where there are several",
    "turngate_worker_restarts_total": "times such a process had to be started again",
    "turngate_open_sessions": "sessions used since the start and not finished",
    "turngate_turns_in_flight": "turns being served now",
    "turngate_unheard_turns": "turns whose client left, kept for its retry",
    "turngate_draining": "1 while the gateway ends and refuses new turns",
    "turngate_engines": "engines the gateway was given",
    "turngate_healthy_engines": "engines that answered their last health check",
    "turngate_tasks": "tasks of the event loop",
    "process_resident_memory_bytes": "resident memory of the gateway's process",
    "process_open_fds": "file descriptors the gateway's process has open",
    "process_cpu_seconds_total": "user and system time of the gateway's process",
    "turngate_engine_up": "1 when the engine takes turns, by engine",
    "turngate_engine_turns": "turns of this gateway inside the engine, by engine",
    "turngate_engine_queued_turns": "turns waiting in the gateway for the engine, by engine",
    "turngate_engine_running_requests": "requests the engine runs, as it said last, by engine",
    "turngate_engine_waiting_requests": "requests waiting inside the engine, as it said last, by engine",
    "turngate_engine_kv_usage": "share of the engine's KV cache in use (0 to 1), as it said last, by engine",
}


@dataclass(frozen=True, slots=True)
class Course:
    """What became of a turn's time besides its `timings`; monotonic ns, except `derender_ns`, which is a sum."""

    derender_ns: int
    committing_ns: int
    committed_ns: int


class Metrics:
    """All counters and histograms; the event loop is the only writer."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        self._buckets = {name: [0] * (len(bounds) + 1) for name, (_, bounds) in HISTOGRAMS.items()}
        self._sums = dict.fromkeys(HISTOGRAMS, 0.0)

    def turn(self, turn: Turn, course: Course) -> None:
        """Count a committed turn."""
        self._add("turngate_turns_total", f'{{kind="{turn.kind}"}}')
        if turn.break_cause:
            self._add("turngate_breaks_total", f'{{cause="{turn.break_cause}"}}')
        self._add("turngate_prompt_tokens_total", "", turn.prompt_tokens)
        self._add("turngate_rendered_tokens_total", "", len(turn.tail_ids))
        self._add("turngate_completion_tokens_total", "", len(turn.completion_ids))
        times = turn.timings
        commit_ns = course.committed_ns - course.committing_ns
        self.observe("turngate_turn_seconds", (course.committed_ns - times.received_ns) / 1e9)
        self.observe("turngate_first_token_seconds", (times.first_token_ns - times.received_ns) / 1e9)
        before_ns, after_ns = times.dispatched_ns - times.received_ns, course.committed_ns - times.done_ns
        self.observe("turngate_overhead_seconds", (before_ns + after_ns) / 1e9)
        self.observe("turngate_derender_seconds", course.derender_ns / 1e9)
        self.observe("turngate_commit_seconds", commit_ns / 1e9)

    def refusal(self, code: str) -> None:
        """Count a refused request."""
        self._add("turngate_refusals_total", f'{{code="{code}"}}')

    def engine(self, name: str, engine: str) -> None:
        """Count something that happened with an engine."""
        self._add(name, f'{{engine="{engine}"}}')

    def run_ended(self, cause: str) -> None:
        """Count a request that got the last words of its run."""
        self._add("turngate_runs_ended_total", f'{{cause="{cause}"}}')

    def idle(self) -> None:
        """Count a session that was closed because nobody spoke in it."""
        self._add("turngate_idle_sessions_total", "")

    def cancelled(self) -> None:
        """Count a turn that was ended because nobody waited for it."""
        self._add("turngate_cancelled_total", "")

    def reattached(self) -> None:
        """Count a request that was told the answer of an equal one."""
        self._add("turngate_reattached_total", "")

    def engine_error(self, error: Exception) -> None:
        """Count what an engine answered instead of a turn."""
        self._add("turngate_engine_errors_total", f'{{kind="{type(error).__name__}"}}')

    def observe(self, name: str, value_s: float) -> None:
        """Put a duration into a histogram."""
        self._buckets[name][bisect_left(HISTOGRAMS[name][1], value_s)] += 1
        self._sums[name] += value_s

    def text(self, gauges: dict[str, float]) -> str:
        """The exposition: counters, histograms and the given gauges, whose keys may have labels."""
        lines: list[str] = []
        for name, words in HELP.items():
            lines += [f"# HELP {name} {words}", f"# TYPE {name} counter"]
            samples = sorted((labels, value) for (n, labels), value in self._counts.items() if n == name)
            lines += [f"{name}{labels} {value}" for labels, value in samples]
        for name, (words, bounds) in HISTOGRAMS.items():
            lines += [f"# HELP {name} {words}", f"# TYPE {name} histogram"]
            reached = 0
            for bound, count in zip((*map(str, bounds), "+Inf"), self._buckets[name], strict=True):
                reached += count
                lines.append(f'{name}_bucket{{le="{bound}"}} {reached}')
            lines += [f"{name}_sum {self._sums[name]:.9g}", f"{name}_count {reached}"]
        told = ""
        for key, number in gauges.items():
            name = key.partition("{")[0]
            if name != told:
                kind = "counter" if name.endswith("_total") else "gauge"
                lines += [f"# HELP {name} {GAUGES[name]}", f"# TYPE {name} {kind}"]
                told = name
            lines.append(f"{key} {number:.15g}")
        return "\n".join(lines) + "\n"

    def _add(self, name: str, labels: str, amount: int = 1) -> None:
        self._counts[name, labels] += amount
