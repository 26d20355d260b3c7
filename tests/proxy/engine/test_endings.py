"""Ends of answers that are known without derender: when it is asked all the same, and what one surprise does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.proxy.engine.test_text_ahead import CALL, END, Derenders, added
from turngate.proxy.engine.derenderer import AnswerStream
from turngate.proxy.engine.endings import EVERY, FIRST, Ending, Endings
from turngate.proxy.engine.text_ahead import TextAhead
from turngate.proxy.engine.types import Chunk

PLAIN = "The tests pass now, so look at the other module. 日本語 "


@pytest.fixture(scope="module")
def qwen(model_dir: Callable[[str], Path]) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir("qwen-coder-0.5b") / "tokenizer.json"))


def believing() -> Endings:
    """Endings that were as expected often enough."""
    endings = Endings()
    for _ in range(FIRST):
        endings.plain.told(True)
        endings.closed.told(True)
    return endings


async def answered(
    tokenizer: Tokenizer,
    text: str,
    endings: Endings | None,
    *,
    whole: bool = False,
    finish: str = "stop",
    cut: int = 0,
) -> tuple[dict[str, Any], int]:
    """An answer in events of eight tokens, and how often derender was asked; `cut` tokens are missing."""
    derenders = Derenders(tokenizer)
    answer = AnswerStream(
        derenders,
        clock=lambda: 0.0,
        mint=lambda: "c",
        whole=whole,
        ahead=TextAhead(tokenizer, added(tokenizer)),
        endings=endings,
    )
    ids = [*tokenizer.encode(text, add_special_tokens=False).ids]
    ids = ids[: len(ids) - cut] + ([END] if finish == "stop" else [])
    said = ""
    for at in range(0, len(ids), 8):
        piece = tuple(ids[at : at + 8])
        last = at + 8 >= len(ids)
        for delta in await answer.feed(Chunk(piece, (), None, finish if last else None, None)):
            said += delta.get("content", "")
    message = answer.message()
    assert said == (message["content"] or "")
    return message, derenders.calls


async def test_the_end_of_a_plain_stream_is_not_asked_for_once_it_is_believed(qwen: Tokenizer) -> None:
    expected, calls = await answered(qwen, PLAIN * 5, None)
    message, fewer = await answered(qwen, PLAIN * 5, believing())
    assert message == expected
    assert (calls, fewer) == (2, 1)


async def test_the_end_of_a_closed_tool_call_is_not_asked_for_once_it_is_believed(qwen: Tokenizer) -> None:
    for whole in (False, True):
        expected, calls = await answered(qwen, PLAIN + CALL, None, whole=whole)
        message, fewer = await answered(qwen, PLAIN + CALL, believing(), whole=whole)
        assert message == expected
        assert message["tool_calls"]
        assert fewer == calls - 1


@pytest.mark.parametrize(
    "text",
    [
        PLAIN + CALL + "\nThat is all.",
        PLAIN + CALL.replace("}}", "}"),
        PLAIN + "<tool_call>\nno call at all\n</tool_call>" + CALL,
        PLAIN + "a <",
        CALL + CALL,
    ],
)
async def test_any_other_end_is_what_derender_says(qwen: Tokenizer, text: str) -> None:
    for finish in ("stop", "length"):
        expected, _ = await answered(qwen, text, None, finish=finish)
        assert (await answered(qwen, text, believing(), finish=finish))[0] == expected


async def test_an_answer_cut_inside_a_character_is_asked_for(qwen: Tokenizer) -> None:
    expected, calls = await answered(qwen, PLAIN * 3 + "🎉", None, finish="length", cut=1)
    assert await answered(qwen, PLAIN * 3 + "🎉", believing(), finish="length", cut=1) == (expected, calls)


def test_an_end_is_believed_after_the_first_ones_were_alike_and_looked_at_now_and_then() -> None:
    ending = Ending()
    for _ in range(FIRST):
        assert not ending.believed()
        ending.told(True)
    for _ in range(3):
        assert [ending.believed() for _ in range(EVERY)] == [True] * (EVERY - 1) + [False]
        ending.told(True)


def test_one_surprise_is_never_forgotten() -> None:
    ending = Ending()
    ending.told(False)
    for _ in range(FIRST * EVERY):
        assert not ending.believed()
        ending.told(True)
