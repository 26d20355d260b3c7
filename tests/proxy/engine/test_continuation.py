"""What changes at a seam, on values: limits, seeds, what cannot be gone on with, and stop strings across it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngate.proxy.engine.continuation import SeamStops, already_over, continued, derived_seed, obstacle
from turngate.proxy.engine.types import Chunk, GenerateCall

PIECES = ("a", "b", "ab", "ba", " a", "\n", "ä", "€")
BYTES = [piece.encode() for piece in PIECES] + [bytes([one]) for one in "ä€".encode()]


def decode(ids: Sequence[int], skip_special: bool) -> str:
    """A tokenizer with pieces of several characters and with bytes of characters."""
    return b"".join(BYTES[one] for one in ids).decode("utf-8", "replace")


def call(**params: Any) -> GenerateCall:
    return GenerateCall("m", np.asarray([1, 2], dtype=np.int32), params, {"features": 1}, "r", 3, 8)


def chunk(*ids: int) -> Chunk:
    return Chunk(ids, tuple(-float(one) for one in ids), tuple(((one, -1.0),) for one in ids), None, None)


def stopped(ids: Sequence[int], at: int, stop: Sequence[str], min_tokens: int) -> tuple[int, set[str]] | None:
    """vLLM's rule in an engine that began at token `at`: the first token whose text completes stop strings, once
    `min_tokens` are past: (tokens up to it, those strings)."""
    begun = len(decode(ids[:at], True).rstrip("\ufffd"))
    said = 0
    for count in range(at + 1, len(ids) + 1):
        text = decode(ids[:count], True).rstrip("\ufffd")[begun:]
        found = {one for one in stop if text.find(one, max(0, said - len(one) + 1)) >= 0}
        if found and count > min_tokens:
            return count, found
        said = len(text)
    return None


def test_what_is_left_of_the_limits_is_asked_for() -> None:
    onward = continued(call(max_tokens=10, min_tokens=4, stop=["x"]), [7, 8, 9])
    assert onward.ids.tolist() == [1, 2, 7, 8, 9]
    assert (onward.sampling_params["max_tokens"], onward.sampling_params["min_tokens"]) == (7, 1)
    assert onward.sampling_params["stop"] == ["x"]
    assert (onward.extra, onward.top_logprobs, onward.interval_tokens) == ({"features": 1}, 3, 8)
    assert onward.request_id != "r"
    assert continued(call(max_tokens=10, min_tokens=2), [7, 8, 9]).sampling_params["min_tokens"] == 0


def test_seeds_differ_by_place_and_follow_from_the_agents_own() -> None:
    assert derived_seed("turn-1", 7, 3) == derived_seed("turn-2", 7, 3)
    seeds = {derived_seed(turn, seed, at) for turn in ("t1", "t2") for seed in (None, 7, 8) for at in range(1, 50)}
    assert len(seeds) == 4 * 49
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(
    ("params", "what"),
    [
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": -1.0}, "frequency_penalty"),
        ({"structured_outputs": {"json": "{}"}}, "structured_outputs"),
        ({"bad_words": ["x y"]}, "bad_words"),
        ({"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.2, "bad_words": []}, None),
    ],
)
def test_what_counts_output_only_cannot_be_gone_on_with(params: dict[str, Any], what: str | None) -> None:
    assert obstacle(call(**params)) == what


def test_an_answer_that_was_complete_is_over() -> None:
    ends = frozenset({9})
    assert already_over({"max_tokens": 3}, [5, 6], ends) is None
    assert already_over({"max_tokens": 2}, [5, 6], ends) == Chunk((), (), None, "length", None)
    assert already_over({"max_tokens": 9}, [5, 9], ends) == Chunk((), (), None, "stop", None)
    assert already_over({"max_tokens": 9, "ignore_eos": True}, [5, 9], ends) is None
    assert already_over({"stop_token_ids": [6]}, [5, 6], ends) == Chunk((), (), None, "stop", 6)
    assert already_over({"max_tokens": 2}, [], ends) is None


@given(
    ids=st.lists(st.integers(0, len(BYTES) - 1), min_size=2, max_size=24),
    stop=st.lists(st.text("ab \nä€", min_size=1, max_size=6), min_size=1, max_size=3),
    at=st.integers(1, 23),
    size=st.integers(1, 4),
    min_tokens=st.integers(0, 6),
)
def test_a_stop_string_ends_the_answer_where_one_engine_would_have(
    ids: list[int], stop: list[str], at: int, size: int, min_tokens: int
) -> None:
    """The engine after the seam sees only what is new; the two of them together find what one would have found."""
    at = min(at, len(ids) - 1)
    whole = stopped(ids, 0, stop, min_tokens)
    if whole is not None and whole[0] <= at:
        return
    second = stopped(ids, at, stop, min_tokens)
    after = ids[at : second[0] if second else len(ids)]
    seam = SeamStops(stop, decode, ids[:at], min_tokens=min_tokens, skip_special=True)
    got, reason = ids[:at], None
    for start in range(0, len(after), size):
        found = chunk(*after[start : start + size])
        if second and start + size >= len(after):
            found = replace(found, finish_reason="stop", stop_reason=min(second[1]))
        if seam.open:
            found = seam.cut(found)
        assert len(found.ids) == len(found.logprobs) == len(found.top or ())
        got, reason = got + list(found.ids), found.stop_reason
        if found.finish_reason is not None:
            break
    if whole is None:
        assert (got, reason) == (ids, None)
    else:
        assert len(got) == whole[0]
        assert reason in whole[1]
