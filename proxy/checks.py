"""What must hold of one recorded turn, whatever its digest says.

Pure: a turn, the turns before it and a few facts of the run in; sentences about what is wrong out. These checks catch
a change that came with a recomputed digest; the digest catches what no structure shows, such as one altered id.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from turngate.proxy.turns import NO_VERSION, BrokenTree, Turn, prompt_ids

LOGPROB_SLACK = 1e-3  # a log-softmax in half precision may end a hair above zero
STOPPED = ("stop", "tool_calls")


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What the run knows. `stop_ids`: tokens that end a turn; empty when unknown. `adapters`: name by policy and
    version. `text_of` decodes ids, special tokens included; None without a tokenizer."""

    stop_ids: frozenset[int] = frozenset()
    adapters: Mapping[tuple[str, int], str] = field(default_factory=dict)
    text_of: Callable[[list[int]], str] | None = None


def check_turn(turn: Turn, known: Mapping[str, Turn], facts: RunFacts) -> list[str]:
    """What is wrong with `turn`; `known` are the turns of its rollout by id."""
    return [*_lengths(turn), *_logprobs(turn), *_spans(turn, facts), *_base(turn, known), *_end(turn, facts)]


def stop_is_checked(turn: Turn, facts: RunFacts) -> bool:
    """Whether the end of this turn could be compared with anything."""
    if turn.finish_reason not in STOPPED or isinstance(turn.stop_reason, int):
        return True
    return bool(facts.stop_ids) if turn.stop_reason is None else facts.text_of is not None


def _lengths(turn: Turn) -> list[str]:
    problems, sampled = [], len(turn.completion_ids)
    if len(turn.logprobs) != sampled:
        problems.append(f"{sampled} completion ids but {len(turn.logprobs)} log-probs")
    for name, top in (("top_ids", turn.top_ids), ("top_logprobs", turn.top_logprobs)):
        if top is not None and len(top) != sampled:
            problems.append(f"{sampled} completion ids but {len(top)} rows of {name}")
    if any(len(ids) and int(ids.min()) < 0 for ids in (turn.tail_ids, turn.completion_ids)):
        problems.append("a token id is negative")
    limit = turn.sampling_used.get("max_tokens")
    if isinstance(limit, int) and sampled > limit:
        problems.append(f"{sampled} completion ids, but the engine was told max_tokens {limit}")
    return problems


def _logprobs(turn: Turn) -> list[str]:
    if turn.mode == "demonstration":
        told = int(np.count_nonzero(~np.isnan(turn.logprobs)))
        return [f"{told} tokens of a demonstration have log-probs, but nothing was sampled"] if told else []
    bad = ~np.isfinite(turn.logprobs) | (turn.logprobs > LOGPROB_SLACK)
    if not bad.any():
        return []
    at = int(np.argmax(bad))
    return [f"{int(bad.sum())} log-probs are not finite or above 0, first at token {at}: {turn.logprobs[at]}"]


def _spans(turn: Turn, facts: RunFacts) -> list[str]:
    problems, reached = [], 0
    for span in turn.spans:
        if span.start != reached or span.end < span.start:
            problems.append(f"span {span.start}:{span.end} does not begin where the last one ended ({reached})")
        reached = span.end
        if (span.version == NO_VERSION) != (turn.mode == "demonstration"):
            problems.append(f"a turn of mode {turn.mode} with tokens of version {span.version}")
            continue
        if span.version in (0, NO_VERSION):
            expected = None
        else:
            expected = facts.adapters.get((span.policy, span.version))
            if expected is None:
                problems.append(f"version {span.version} of {span.policy} was never allocated")
                continue
        if span.adapter != expected:
            problems.append(f"version {span.version} of {span.policy} is adapter {expected}, not {span.adapter}")
    if reached != len(turn.completion_ids):
        problems.append(f"spans cover {reached} of {len(turn.completion_ids)} completion ids")
    return problems


def _base(turn: Turn, known: Mapping[str, Turn]) -> list[str]:
    try:
        prompt_ids(known, turn)
    except BrokenTree as error:
        return [str(error)]
    base = known.get(turn.base) if turn.base is not None else None
    if turn.kind == "first" and (turn.base is not None or turn.base_tokens):
        return [f"a first turn may not continue {turn.base}"]
    if turn.kind == "spliced" and (base is None or turn.base_tokens != base.path_tokens):
        return [f"a spliced turn must continue the whole path of its base; it takes {turn.base_tokens} tokens"]
    if turn.kind == "break" and not turn.break_cause:
        return ["a break without a cause"]
    if turn.kind != "first" and turn.prompt_tokens == 0:
        return ["an empty prompt"]
    return []


def _end(turn: Turn, facts: RunFacts) -> list[str]:
    """A stopped turn ends with what stopped it: the token, or the whole stop string."""
    if turn.finish_reason not in STOPPED or not stop_is_checked(turn, facts):
        return []
    if len(turn.completion_ids) == 0:
        return [f"finish reason {turn.finish_reason}, but no completion ids"]
    last, reason = int(turn.completion_ids[-1]), turn.stop_reason
    if reason is None and last not in facts.stop_ids:
        return [f"finish reason {turn.finish_reason}, but the last id {last} is no stop token of this model"]
    if isinstance(reason, int) and last != reason:
        return [f"stopped by token {reason}, but the last id is {last}"]
    if isinstance(reason, str) and facts.text_of is not None:
        tail = turn.completion_ids[-(8 + 4 * len(reason)) :].tolist()
        if reason not in facts.text_of(tail):
            return [f"stopped by {reason!r}, which the last tokens do not contain"]
    return []
