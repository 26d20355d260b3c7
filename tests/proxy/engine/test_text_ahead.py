"""Text ahead of derender: whatever is said and however it is cut, the agent gets what derender alone would give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.fake_engine.parser import deltas, parse
from turngate.proxy.engine.derenderer import AnswerStream
from turngate.proxy.engine.text_ahead import TextAhead
from turngate.proxy.engine.types import Chunk
from turngate.proxy.engine.wire import Delta, State, clean_delta

CALL = '<tool_call>\n{"name": "f", "arguments": {"a":  1}}\n</tool_call>'
PIECES = [
    "Hello ",
    "<tool_",
    "<tool_call>",
    CALL,
    "<",
    "a < b",
    "日本語 🎉",
    "\n\n",
    "é",
    "<think>",
    "x</think>",
    "fn(x)[1] ",
]
END = 151645  # <|im_end|> of Qwen2.5


@pytest.fixture(scope="module")
def qwen(model_dir: Callable[[str], Path]) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir("qwen-coder-0.5b") / "tokenizer.json"))


class Derenders:
    """A derender over real tokens with the fake engine's parser. `lies` makes it say something else each time."""

    def __init__(self, tokenizer: Tokenizer, *, lies: bool = False) -> None:
        self.tokenizer, self.lies, self.calls = tokenizer, lies, 0

    async def __call__(self, ids: Sequence[int], finish: str | None, state: State | None) -> tuple[Delta, State]:
        self.calls += 1
        state = state or {"all": [], "ids": []}
        call_ids = [*state["ids"]]
        old, new = self.parsed(state["all"], final=False), self.parsed([*state["all"], *ids], final=finish is not None)
        delta = clean_delta(deltas(old, new, call_ids))
        if self.lies and self.calls > 1 and "content" in delta:
            delta["content"] = delta["content"].upper()
        return delta, {"all": [*state["all"], *ids], "ids": call_ids}

    def parsed(self, ids: Sequence[int], *, final: bool) -> Any:
        text = self.tokenizer.decode(list(ids), skip_special_tokens=False).rstrip("\ufffd")
        return parse(text, thinking=False, final=final)


def added(tokenizer: Tokenizer) -> frozenset[int]:
    return frozenset(tokenizer.get_added_tokens_decoder())


async def said(
    tokenizer: Tokenizer, ids: Sequence[int], cuts: Sequence[int], *, ahead: bool, whole: bool = False, stop: str = ""
) -> tuple[dict[str, Any], str, int, list[Delta]]:
    """Message, text of all deltas, derender's calls, and the deltas before the last chunk."""
    derenders = Derenders(tokenizer)
    answer = AnswerStream(
        derenders,
        stop=[stop] if stop else (),
        clock=lambda: 0.0,
        mint=lambda: "c",
        whole=whole,
        ahead=TextAhead(tokenizer, added(tokenizer)) if ahead else None,
    )
    at = [0, *sorted({cut for cut in cuts if cut < len(ids)}), len(ids)]
    early: list[Delta] = []
    last: list[Delta] = []
    for begin, end in pairwise(at):
        early += last
        piece = (*ids[begin:end], END) if end == len(ids) else tuple(ids[begin:end])
        reasons = ("stop", stop or None) if end == len(ids) else (None, None)
        last = await answer.feed(Chunk(piece[: len(piece) - bool(stop and reasons[0])], (), None, *reasons))
    text = "".join(delta.get("content", "") for delta in [*early, *last])
    assert answer.agreed
    return answer.message(), text, derenders.calls, early


@given(st.lists(st.sampled_from(PIECES), max_size=8), st.lists(st.integers(1, 60), max_size=20), st.booleans())
@settings(max_examples=150, deadline=None)
async def test_text_ahead_adds_up_to_what_derender_says(
    qwen: Tokenizer, pieces: list[str], cuts: list[int], spelled: bool
) -> None:
    encoded = [qwen.encode(piece, add_special_tokens=False).ids for piece in pieces]
    if spelled:  # markers in ordinary tokens: letter by letter
        encoded = [[one for char in piece for one in qwen.encode(char).ids] for piece in pieces]
    ids = [one for piece in encoded for one in piece]
    if not ids:
        return
    expected, _, _, _ = await said(qwen, ids, [], ahead=False, whole=True)
    for whole in (False, True):
        message, text, _, _ = await said(qwen, ids, cuts, ahead=True, whole=whole)
        assert message == expected
        assert text == (expected["content"] or "")


async def test_a_plain_answer_streams_with_two_derender_calls(qwen: Tokenizer) -> None:
    ids = qwen.encode("The tests pass now, so look at the other module. " * 10).ids
    message, text, calls, early = await said(qwen, ids, range(1, len(ids), 4), ahead=True)
    assert calls == 2
    assert text == message["content"] == "The tests pass now, so look at the other module. " * 10
    assert len(early) > len(ids) / 5
    assert (await said(qwen, ids, range(1, len(ids), 4), ahead=True, whole=True))[2] == 1


async def test_a_tool_call_is_left_to_derender(qwen: Tokenizer) -> None:
    ids = qwen.encode("Let me look. " + CALL).ids
    message, text, _, _ = await said(qwen, ids, range(1, len(ids)), ahead=True)
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a":  1}'}
    assert text == "Let me look. "


async def test_a_stop_string_is_never_given_ahead(qwen: Tokenizer) -> None:
    ids = qwen.encode("One two three STOP").ids
    message, text, _, _ = await said(qwen, ids, range(1, len(ids)), ahead=True, stop="STOP")
    assert text == message["content"] == "One two three "


async def test_a_derender_that_says_otherwise_is_noticed_and_believed_from_then_on(qwen: Tokenizer) -> None:
    ids = qwen.encode("one two three four").ids
    answer = AnswerStream(
        Derenders(qwen, lies=True), clock=lambda: 0.0, ahead=TextAhead(qwen, added(qwen)), mint=lambda: "c"
    )
    for one in ids:
        await answer.feed(Chunk((one,), (0.0,), None, None, None))
    await answer.feed(Chunk((END,), (0.0,), None, "stop", None))
    assert not answer.agreed
    assert answer.message()["content"] == "one two three four"
