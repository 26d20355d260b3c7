"""Which part of a run takes how many cores: one JSON line a second, until it is ended.

python bench/gpu/cpus.py > cpus.jsonl

A line has `at` (s of the epoch), `cores` of the machine, `busy` cores, and `by`: the cores that engine core, API
server, render server, gateway, runner, trainer and launcher took since the line before; agents take the rest.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections import Counter

import psutil

PARTS = {
    "engine_core": r"VLLM::EngineCore",
    "render_server": r"launch render",
    "api_server": r"vllm\.entrypoints",
    "gateway": r"\bproxy\b.*--store",
    "runner": r"/(runner|demonstrations)\.yaml",
    "evaluator": r"/(evaluator|eval)\.yaml",
    "trainer": r"/(trainer|sft)\.yaml",
    "launcher": r"\blaunch\.py\b",
}
EVERY_S = 1.0


def part_of(command: str) -> str | None:
    """The part that a command line belongs to; agents and others belong to none."""
    return next((part for part, pattern in PARTS.items() if re.search(pattern, command)), None)


def sampled(known: dict[int, tuple[float, str | None]]) -> dict[int, tuple[str, float]]:
    """CPU seconds so far of each process of a part; `known` keeps what a process is, so that it is looked up once."""
    found = {}
    for process in psutil.process_iter():
        try:
            began = process.create_time()
            if known.get(process.pid, (0.0, None))[0] != began:
                known[process.pid] = (began, part_of(" ".join(process.cmdline())))
            part = known[process.pid][1]
            if part is not None:
                times = process.cpu_times()
                found[process.pid] = (part, times.user + times.system)
        except psutil.Error:
            continue
    return found


def busy_s() -> float:
    """CPU seconds that all cores were busy so far."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - getattr(times, "guest", 0) - getattr(times, "guest_nice", 0))


def main() -> int:
    """Print lines."""
    known: dict[int, tuple[float, str | None]] = {}
    before, busy, at = sampled(known), busy_s(), time.time()
    while True:
        time.sleep(EVERY_S)
        now, now_busy, now_at = sampled(known), busy_s(), time.time()
        span_s, by = now_at - at, Counter[str]()
        for pid, (part, seconds) in now.items():
            by[part] += max(0.0, seconds - before.get(pid, (part, 0.0))[1]) / span_s
        line = {"at": now_at, "cores": psutil.cpu_count(), "busy": round((now_busy - busy) / span_s, 3)}
        print(json.dumps(line | {"by": {part: round(cores, 3) for part, cores in sorted(by.items())}}), flush=True)
        before, busy, at = now, now_busy, now_at


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(0)
