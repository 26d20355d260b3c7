"""Ends of answers that are not asked for: against the real vLLM's hermes parser, what is left out says nothing new."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.conftest import FindModel
from tests.engines import RealEngine
from tests.proxy.engine.test_endings import PLAIN, believing
from tests.proxy.engine.test_real_engine import TOOL, TOOL_ANSWERS
from tests.proxy.engine.test_text_ahead import END, added
from turngate.proxy.engine import AnswerStream, Chunk, EngineHttp, Replica, derender_request
from turngate.proxy.engine.endings import Endings
from turngate.proxy.engine.text_ahead import TextAhead

pytestmark = pytest.mark.engine

ANSWERS = [
    PLAIN * 4,
    "if (a < b) { return `}`; }  \n",
    *(text for text, _ in TOOL_ANSWERS.values()),
    'Look.\n<tool_call>\n{"name": "bash", "arguments": {"a": "awk \'{ print $1 }\'; }}{"}}\n</tool_call>\nThat is all.',
    '<tool_call>\n{"name": "bash", "arguments": {"a": {"b": {}}}}\n</tool_call>\n',
    "<tool_call>\nno call at all\n</tool_call>",
]


async def answered(
    replica: Replica, tokenizer: Tokenizer, ids: Sequence[int], finish: str, endings: Endings | None, size: int
) -> tuple[dict[str, Any], str, str | None, int]:
    """Message, the text that was streamed, finish reason, and calls of derender."""
    calls = 0
    assert replica.capabilities is not None
    derender = replica.derenderer(replica.capabilities.model, "r", derender_request({"tools": [TOOL]}), [1] * 20)

    async def counted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return await derender(*args)

    ahead = TextAhead(tokenizer, added(tokenizer))
    whole = size == len(ids)
    answer = AnswerStream(counted, clock=time.monotonic, mint=lambda: "c", whole=whole, ahead=ahead, endings=endings)
    said = ""
    for at in range(0, len(ids), size):
        piece = tuple(ids[at : at + size])
        last = at + size >= len(ids)
        for delta in await answer.feed(Chunk(piece, (0.0,) * len(piece), None, finish if last else None, None)):
            said += delta.get("content", "")
    return answer.message(), said, answer.finish_reason, calls


async def test_an_end_that_is_believed_is_what_the_parser_would_have_said(
    qwen_engine: RealEngine, model_dir: FindModel
) -> None:
    tokenizer = Tokenizer.from_file(str(model_dir("qwen-coder-0.5b") / "tokenizer.json"))
    http = EngineHttp()
    replica = Replica("r", qwen_engine.url, http)
    await replica.probe()
    saved = 0
    for text in ANSWERS:
        sampled = tokenizer.encode(text, add_special_tokens=False).ids
        for ids, finish in (([*sampled, END], "stop"), (sampled[:-1], "length")):
            for size in (8, len(ids)):
                *expected, asked = await answered(replica, tokenizer, ids, finish, None, size)
                *found, fewer = await answered(replica, tokenizer, ids, finish, believing(), size)
                assert found == expected, (text, finish, size)
                saved += asked - fewer
    await http.aclose()
    assert saved >= 2 * len(TOOL_ANSWERS)
