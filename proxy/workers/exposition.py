"""Metrics of several processes as one page of Prometheus' text format, each sample with the worker that counted it.

Labelled rather than summed: a restarted worker's counters begin at 0 again, which only its own series may show.
"""

from __future__ import annotations

from collections.abc import Mapping


def merged(own: str, workers: Mapping[int, str]) -> str:
    """`own` as it is, and each worker's samples with the label `worker`; every metric is described once."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for worker, text in [(None, own), *workers.items()]:
        name = ""
        for line in text.splitlines():
            if line.startswith("#"):
                name = line.split(" ", 3)[2]
                known = heads.setdefault(name, [])
                if line not in known and len(known) < 2:
                    known.append(line)
            elif line:
                samples.setdefault(name, []).append(line if worker is None else _labelled(line, worker))
    lines = [line for name in heads for line in (*heads[name], *samples.get(name, ()))]
    return "\n".join(lines) + "\n"


def _labelled(sample: str, worker: int) -> str:
    name, brace, rest = sample.partition("{")
    if brace:
        return f'{name}{{worker="{worker}",{rest}'
    name, _, value = sample.partition(" ")
    return f'{name}{{worker="{worker}"}} {value}'
