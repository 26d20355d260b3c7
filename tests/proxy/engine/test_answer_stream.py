"""One answer's deltas: they add up to one message however the tokens arrive, and nothing of a stop leaks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fake_engine.parser import deltas, parse
from turngate.proxy.engine.derenderer import MIN_GAP_S, AnswerStream, mint_tool_call_id
from turngate.proxy.engine.errors import EngineUnavailable
from turngate.proxy.engine.types import Chunk
from turngate.proxy.engine.wire import Delta, State, clean_delta

STOP_ID = 0
CALL = '<tool_call>\n{"name": "f", "arguments": {"a":  1}}\n</tool_call>'


class Letters:
    """A derender whose tokens are characters. Counts its calls, and fails while told to."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str | None]] = []
        self.failing = False

    async def __call__(self, ids: Sequence[int], finish: str | None, state: State | None) -> tuple[Delta, State]:
        if self.failing:
            raise EngineUnavailable("down")
        assert STOP_ID not in ids
        text = "".join(map(chr, ids))
        self.calls.append((text, finish))
        state = state or {"text": "", "ids": []}
        before, call_ids = state["text"], [*state["ids"]]
        old = parse(before, thinking=False, final=False)
        new = parse(before + text, thinking=False, final=finish is not None)
        return clean_delta(deltas(old, new, call_ids)), {"text": before + text, "ids": call_ids}


def ticking(step_s: float) -> Callable[[], float]:
    """A clock that goes on by `step_s` each time it is read."""
    counter = itertools.count()
    return lambda: next(counter) * step_s


def stream(derender: Letters, stop: Sequence[str] = (), step_s: float = 1.0) -> AnswerStream:
    """An answer whose call ids are c0, c1, …"""
    names = (f"c{i}" for i in itertools.count())
    return AnswerStream(derender, stop=stop, clock=ticking(step_s), mint=lambda: next(names))


async def feed(answer: AnswerStream, pieces: Sequence[str], finish: str, stop_reason: str | None) -> list[Delta]:
    """Feed text in pieces; the last carries the finish reason, and the stop token where there is one."""
    out: list[Delta] = []
    for number, piece in enumerate(pieces):
        last = number == len(pieces) - 1
        ids = [ord(char) for char in piece]
        if last and finish == "stop" and stop_reason is None:
            ids.append(STOP_ID)
        reasons = (finish, stop_reason) if last else (None, None)
        out += await answer.feed(Chunk(tuple(ids), (0.0,) * len(ids), None, *reasons))
    return out


def added(found: Sequence[Delta]) -> dict[str, Any]:
    """What a client makes of deltas."""
    texts: dict[str, str] = {}
    calls: dict[int, dict[str, Any]] = {}
    for delta in found:
        for key, value in delta.items():
            if key != "tool_calls":
                texts[key] = texts.get(key, "") + value
                continue
            for entry in value:
                call = calls.setdefault(entry["index"], {"id": entry.get("id"), "name": None, "arguments": ""})
                call["name"] = entry["function"].get("name", call["name"])
                call["arguments"] += entry["function"].get("arguments", "")
    return {"texts": texts, "calls": [calls[index] for index in sorted(calls)]}


def split(text: str, cuts: Sequence[int]) -> list[str]:
    """`text` in pieces at `cuts`."""
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in itertools.pairwise(edges)] or [""]


TEXTS = st.lists(
    st.sampled_from(["Hello ", "<", "<to", "日本", "\n", CALL, "<think>x</think>", "STOP", "ST", "}", "é"]), max_size=7
).map("".join)


@given(TEXTS, st.lists(st.integers(0, 200), max_size=8), st.sampled_from(["stop", "length"]))
async def test_deltas_add_up_to_the_message_and_chunking_does_not_matter(
    text: str, cuts: list[int], finish: str
) -> None:
    whole, pieces = stream(Letters()), stream(Letters())
    await feed(whole, [text], finish, None)
    found = await feed(pieces, split(text, cuts), finish, None)
    assert pieces.message() == whole.message()
    assert pieces.finish_reason == whole.finish_reason
    message, client = pieces.message(), added(found)
    assert client["texts"].get("content", "") == (message["content"] or "")
    assert client["texts"].get("reasoning") == message.get("reasoning")
    called = [{"id": call["id"], **call["function"]} for call in message.get("tool_calls", ())]
    assert client["calls"] == called


@given(TEXTS, st.lists(st.integers(0, 200), max_size=8), st.sampled_from(["", "x", "\n"]))
async def test_no_part_of_a_stop_string_reaches_the_client(text: str, cuts: list[int], rest: str) -> None:
    before = text.replace("STOP", "").replace("<", "").replace(CALL, "")
    answer = stream(Letters(), stop=["STOP", "\n\n\n"])
    pieces = split(before, cuts)
    found = await feed(answer, [*pieces, "STOP" + rest], "stop", "STOP")
    assert answer.message()["content"] == before
    assert added(found)["texts"].get("content", "") == before


async def test_the_beginning_of_a_stop_string_is_given_once_it_turns_out_to_be_none() -> None:
    answer = stream(Letters(), stop=["STOP"])
    assert await answer.feed(Chunk((ord("a"),), (0.0,), None, None, None)) == [{"content": "a"}]
    assert await answer.feed(Chunk(tuple(map(ord, "ST")), (0.0,) * 2, None, None, None)) == []
    assert await answer.feed(Chunk((ord("x"),), (0.0,), None, None, None)) == [{"content": "STx"}]


async def test_a_stop_string_inside_arguments_cuts_there() -> None:
    answer = stream(Letters(), stop=["rm"])
    await feed(answer, ['<tool_call>\n{"name": "f", "arguments": {"a": "ls; r', "m"], "stop", "rm")
    assert answer.message()["tool_calls"][0]["function"]["arguments"] == '{"a": "ls; '


async def test_the_stop_token_is_never_sent_and_the_finish_reason_comes_alone() -> None:
    letters = Letters()
    await feed(stream(letters), ["Hello"], "stop", None)
    assert letters.calls == [("Hello", None), ("", "stop")]


async def test_a_lone_stop_token_is_an_empty_answer() -> None:
    answer = stream(Letters())
    assert await feed(answer, [""], "stop", None) == []
    assert answer.message() == {"role": "assistant", "content": ""}
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize(("finish", "expected"), [("stop", "tool_calls"), ("length", "length")])
async def test_length_inside_a_tool_call_stays_length(finish: str, expected: str) -> None:
    answer = stream(Letters())
    await feed(answer, ['<tool_call>\n{"name": "f", "arguments": {"a": '], finish, None)
    assert answer.finish_reason == expected
    assert answer.message()["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a":'}
    assert answer.message()["content"] is None


async def test_a_function_forced_by_name_finishes_with_stop() -> None:
    answer = AnswerStream(Letters(), clock=ticking(1.0), named_choice=True)
    await feed(answer, [CALL], "stop", None)
    assert answer.finish_reason == "stop"


async def test_tool_call_ids_are_minted_alphanumeric_and_keep_their_index() -> None:
    assert mint_tool_call_id().isalnum()
    answer = stream(Letters())
    found = await feed(answer, [CALL, CALL], "stop", None)
    assert [call["id"] for call in added(found)["calls"]] == ["c0", "c1"]
    assert [call["id"] for call in answer.message()["tool_calls"]] == ["c0", "c1"]


async def test_the_first_token_is_derendered_at_once_and_then_ten_times_a_second() -> None:
    letters, now = Letters(), [0.0]
    answer = AnswerStream(letters, clock=lambda: now[0])
    for _ in range(200):
        await answer.feed(Chunk((ord("a"),), (0.0,), None, None, None))
        now[0] += 0.01
    assert letters.calls[0] == ("a", None)
    assert 10 <= len(letters.calls) <= 2.0 / MIN_GAP_S + 1
    assert max(len(text) for text, _ in letters.calls) <= 12


async def test_a_costly_derender_is_called_as_the_output_grows() -> None:
    now = [0.0]

    class Slow(Letters):
        async def __call__(self, ids: Sequence[int], finish: str | None, state: State | None) -> tuple[Delta, State]:
            now[0] += 5.0
            return await super().__call__(ids, finish, state)

    letters = Slow()
    answer = AnswerStream(letters, clock=lambda: now[0])
    for _ in range(1000):
        await answer.feed(Chunk((ord("a"),), (0.0,), None, None, None))
        now[0] += 0.11
    assert len(letters.calls) < 40


async def test_nothing_is_lost_when_derender_fails_and_another_takes_over() -> None:
    broken, other = Letters(), Letters()
    answer = stream(broken)
    first = await answer.feed(Chunk((ord("a"),), (0.0,), None, None, None))
    broken.failing = True
    with pytest.raises(EngineUnavailable):
        await answer.feed(Chunk((ord("b"), STOP_ID), (0.0,) * 2, None, "stop", None))
    answer.derender = other
    assert [*first, *await answer.advance()] == [{"content": "a"}, {"content": "b"}]
    assert answer.done
    assert await answer.advance() == []
