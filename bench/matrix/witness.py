"""Rows as an outsider sees them: from raw bodies between gateway and engine, with no code of the gateway.

A generation that broke and was gone on with counts as one. It must never use what the gateway recorded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

from tests.tap import GENERATE, Exchange, Generation

OutsideRow = tuple[tuple[int, ...], tuple[float | None, ...]]


def generations(exchanges: Sequence[Exchange]) -> list[Generation]:
    """Finished generations in order of their requests; what a broken one had given stands before its continuation."""
    found: list[Generation] = []
    broken: list[Generation] = []
    for exchange in exchanges:
        if exchange.path != GENERATE:
            continue
        one = _read(exchange)
        before = next((b for b in broken if b.completion and one.prompt == b.prompt + b.completion), None)
        if before is not None:
            broken.remove(before)
            one = replace(
                one,
                prompt=before.prompt,
                completion=before.completion + one.completion,
                logprobs=before.logprobs + one.logprobs,
            )
        (found if one.finish_reason in ("stop", "length") else broken).append(one)
    return found


def rows(made: Sequence[Generation], trained: Callable[[Generation], bool]) -> list[OutsideRow]:
    """`(ids, log-prob or None per id)` of every root-to-leaf path with a trained token; each is trained once."""
    paths = [one.prompt + one.completion for one in made]
    leaves = [i for i in range(len(made)) if not any(_continues(one.prompt, paths[i]) for one in made[i + 1 :])]
    done: set[int] = set()
    found = []
    for leaf in leaves:
        row: list[float | None] = [None] * len(paths[leaf])
        for i, one in enumerate(made[: leaf + 1]):
            if i not in done and trained(one) and (i == leaf or _continues(paths[leaf], paths[i])):
                row[len(one.prompt) : len(paths[i])] = one.logprobs
                done.add(i)
        if any(logprob is not None for logprob in row):
            found.append((paths[leaf], tuple(row)))
    return found


def _continues(ids: tuple[int, ...], head: tuple[int, ...]) -> bool:
    return len(ids) > len(head) and ids[: len(head)] == head


def _read(exchange: Exchange) -> Generation:
    """What came of one request so far, finished or not; streamed or whole."""
    ids: list[int] = []
    logprobs: list[float] = []
    finish = ""
    text = exchange.response.decode()
    events = [line[6:] for line in text.splitlines() if line.startswith("data: ")] or [text or "{}"]
    for event in events:
        if event == "[DONE]":
            continue
        for choice in json.loads(event).get("choices") or ():
            ids += choice.get("token_ids") or ()
            logprobs += [entry["logprob"] for entry in (choice.get("logprobs") or {}).get("content") or ()]
            finish = choice.get("finish_reason") or finish
    prompt = json.loads(exchange.request)["token_ids"]
    return Generation(tuple(prompt), tuple(ids), tuple(logprobs), finish)
