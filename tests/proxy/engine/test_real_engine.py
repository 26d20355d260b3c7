"""The engine client against the real vLLM: what its docs leave open is checked here, on the wire."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.engines import RealEngine
from turngate.proxy.engine import (
    AnswerStream,
    Chunk,
    ContextOverflow,
    EngineFault,
    EngineHttp,
    EngineRefused,
    GenerateCall,
    Replica,
    derender_request,
)
from turngate.proxy.ids import uuid7

pytestmark = pytest.mark.engine

STORY = [{"role": "user", "content": "Tell me a story about a dog and a cat."}]
TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}
TOOL_ANSWERS = {
    "parallel": (
        'Sure.\n<tool_call>\n{"name": "bash", "arguments": {"a": "ls"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "bash", "arguments": {"a": "pwd"}}\n</tool_call>',
        ['{"a": "ls"}', '{"a": "pwd"}'],
    ),
    "unicode": (
        '<tool_call>\n{"name": "bash", "arguments": {"a": "héllo 日本 🎉 \\u00e9"}}\n</tool_call>',
        ['{"a": "héllo 日本 🎉 \\u00e9"}'],
    ),
    "odd whitespace": (
        '<tool_call>\n{ "name" :  "bash" ,\n  "arguments" : {  "a":\t"ls  -la" , "n": 1.0 } }\n</tool_call>',
        ['{  "a":\t"ls  -la" , "n": 1.0 }'],
    ),
    "broken JSON": ('<tool_call>\n{"name": "bash", "arguments": {"a": "ls\n</tool_call>', ['{"a": "ls']),
    "no arguments": ('<tool_call>\n{"name": "bash", "arguments": {}}\n</tool_call>', ["{}"]),
}


@pytest.fixture
async def http() -> AsyncIterator[EngineHttp]:
    client = EngineHttp()
    yield client
    await client.aclose()


async def connect(engine: RealEngine, http: EngineHttp) -> Replica:
    replica = Replica("r", engine.url, http)
    await replica.probe()
    return replica


async def call_for(replica: Replica, body: dict[str, Any], top_logprobs: int = 0) -> GenerateCall:
    rendered = await replica.render(body)
    request_id = uuid7(time.time_ns())
    return GenerateCall(body["model"], rendered.ids, rendered.sampling_params, rendered.extra, request_id, top_logprobs)


async def answer_to(replica: Replica, body: dict[str, Any]) -> tuple[AnswerStream, list[Chunk], list[dict[str, Any]]]:
    """The answer, its chunks and its deltas."""
    call = await call_for(replica, body)
    derender = replica.derenderer(call.model, call.request_id, derender_request(body), call.ids)
    answer = AnswerStream(derender, stop=body.get("stop", ()), clock=time.monotonic)
    chunks, deltas = [], []
    async for chunk in replica.generate(call):
        chunks.append(chunk)
        deltas += await answer.feed(chunk)
    return answer, chunks, deltas


async def tokenized(replica: Replica, http: EngineHttp, model: str, text: str) -> list[int]:
    body = {"model": model, "prompt": text, "add_special_tokens": False}
    ids: list[int] = (await http.post(f"{replica.url}/tokenize", body))["tokens"]
    return ids


async def test_the_probe_of_an_engine_without_parser(smollm_engine: RealEngine, http: EngineHttp) -> None:
    found = (await connect(smollm_engine, http)).capabilities
    assert found is not None
    assert (found.exact, found.logprobs_mode, found.has_parser) == (True, "processed", False)
    assert (found.derender_tail_tokens, found.runtime_lora, found.max_loras) == (8, True, 4)


async def test_three_calls_say_what_one_chat_completion_says(smollm_engine: RealEngine, http: EngineHttp) -> None:
    replica = await connect(smollm_engine, http)
    body = {"model": smollm_engine.model, "messages": STORY, "max_tokens": 40, "temperature": 0}
    answer, chunks, _ = await answer_to(replica, body)
    whole = await replica.chat(body)
    assert [token for chunk in chunks for token in chunk.ids] == whole["choices"][0]["token_ids"]
    assert answer.message()["content"] == whole["choices"][0]["message"]["content"]
    assert answer.finish_reason == whole["choices"][0]["finish_reason"] == "length"
    logprobs = [logprob for chunk in chunks for logprob in chunk.logprobs]
    theirs = [entry["logprob"] for entry in whole["choices"][0]["logprobs"]["content"]]
    assert logprobs == pytest.approx(theirs, abs=1e-3)


async def test_a_stop_string_is_in_the_ids_but_not_in_the_text(smollm_engine: RealEngine, http: EngineHttp) -> None:
    replica = await connect(smollm_engine, http)
    plain = {"model": smollm_engine.model, "messages": STORY, "max_tokens": 40, "temperature": 0}
    text = (await answer_to(replica, plain))[0].message()["content"]
    stop = text[30:36]
    answer, chunks, deltas = await answer_to(replica, plain | {"stop": [stop]})
    assert answer.message()["content"] == text[: text.index(stop)]
    assert "".join(delta.get("content", "") for delta in deltas) == answer.message()["content"]
    assert (chunks[-1].finish_reason, chunks[-1].stop_reason) == ("stop", stop)


async def test_the_end_of_turn_token_is_in_the_ids_but_not_in_the_text(
    smollm_engine: RealEngine, http: EngineHttp
) -> None:
    replica = await connect(smollm_engine, http)
    body = {"model": smollm_engine.model, "messages": [{"role": "user", "content": "Say only: Hi"}], "max_tokens": 200}
    answer, chunks, _ = await answer_to(replica, body | {"temperature": 0})
    (end,) = await tokenized(replica, http, smollm_engine.model, "<|im_end|>")
    assert chunks[-1].finish_reason == "stop"
    assert chunks[-1].ids[-1] == end
    assert "<|im_end|>" not in answer.message()["content"]


async def test_top_alternatives_are_the_likeliest_of_all(smollm_engine: RealEngine, http: EngineHttp) -> None:
    replica = await connect(smollm_engine, http)
    body = {"model": smollm_engine.model, "messages": STORY, "max_tokens": 8, "temperature": 1.5, "seed": 3}
    few = [chunk async for chunk in replica.generate(await call_for(replica, body, 2))]
    many = [chunk async for chunk in replica.generate(await call_for(replica, body, 10))]
    for short, long in zip(few, many, strict=True):
        assert short.ids == long.ids
        assert short.top is not None
        assert long.top is not None
        for two, ten in zip(short.top, long.top, strict=True):
            assert [token for token, _ in two] == [token for token, _ in ten[:2]]


async def test_chunks_can_be_made_larger_but_the_first_token_comes_alone(
    smollm_engine: RealEngine, http: EngineHttp
) -> None:
    replica = await connect(smollm_engine, http)
    call = await call_for(replica, {"model": smollm_engine.model, "messages": STORY, "max_tokens": 9, "seed": 1})
    call.sampling_params["stream_interval"] = 4
    assert [len(chunk.ids) async for chunk in replica.generate(call)] == [1, 4, 4]


async def test_an_abandoned_or_aborted_generation_stops_in_the_engine(
    qwen_engine: RealEngine, http: EngineHttp
) -> None:
    replica = await connect(qwen_engine, http)
    body = {"model": qwen_engine.model, "messages": STORY, "max_tokens": 4000, "temperature": 2.0, "seed": 5}
    async with aclosing(replica.generate(await call_for(replica, body))) as chunks:
        await anext(chunks)
        assert (await replica.load()).running == 1
    await until_idle(replica)
    call = await call_for(replica, body)
    async with aclosing(replica.generate(call)) as chunks:
        await anext(chunks)
        await replica.abort(call.request_id)
        with pytest.raises(EngineFault, match="abort"):
            await drain(chunks)
    await until_idle(replica)


async def until_idle(replica: Replica) -> None:
    """Wait, far shorter than 4,000 tokens take, until the engine runs nothing."""
    async with asyncio.timeout(20):
        while (await replica.load()).running:
            await asyncio.sleep(0.1)


async def drain(chunks: AsyncIterator[Chunk]) -> None:
    """Read to the end."""
    async for _ in chunks:
        continue


async def test_refusals_are_told_apart(smollm_engine: RealEngine, http: EngineHttp) -> None:
    replica = await connect(smollm_engine, http)
    with pytest.raises(ContextOverflow):
        await replica.render({"model": smollm_engine.model, "messages": [{"role": "user", "content": "word " * 9000}]})
    call = await call_for(replica, {"model": smollm_engine.model, "messages": STORY})
    long = call.ids.repeat(300)
    for ids in (long, long[:8192]):
        with pytest.raises(ContextOverflow):
            await anext(replica.generate(GenerateCall(call.model, ids, call.sampling_params, {}, "overflow")))
    with pytest.raises(EngineRefused, match="nobody"):
        await anext(replica.generate(GenerateCall("nobody", call.ids, call.sampling_params, {}, "unknown")))
    with pytest.raises(EngineRefused, match="no-such-folder"):
        await replica.load_adapter("x-v1", "/no-such-folder")
    await replica.unload_adapter("x-v1")


async def test_the_probe_of_an_engine_with_the_hermes_parser(qwen_engine: RealEngine, http: EngineHttp) -> None:
    found = (await connect(qwen_engine, http)).capabilities
    assert found is not None
    assert (found.exact, found.logprobs_mode, found.has_parser) == (True, "processed", True)
    assert found.derender_tail_tokens == 8


@pytest.mark.parametrize("name", TOOL_ANSWERS)
@pytest.mark.parametrize("tokens", [1, 7, 1000])
async def test_tool_arguments_are_verbatim_however_the_tokens_arrive(
    qwen_engine: RealEngine, http: EngineHttp, name: str, tokens: int
) -> None:
    replica = await connect(qwen_engine, http)
    text, arguments = TOOL_ANSWERS[name]
    body = {"model": qwen_engine.model, "messages": STORY, "tools": [TOOL]}
    rendered = await replica.render(body)
    ids = [
        *(await tokenized(replica, http, qwen_engine.model, text)),
        *(await tokenized(replica, http, qwen_engine.model, "<|im_end|>")),
    ]
    ticks = itertools.count()
    derender = replica.derenderer(qwen_engine.model, "q", derender_request(body), rendered.ids)
    answer = AnswerStream(derender, clock=lambda: float(next(ticks)))
    deltas = []
    for at in range(0, len(ids), tokens):
        piece = tuple(ids[at : at + tokens])
        finish = "stop" if at + tokens >= len(ids) else None
        deltas += await answer.feed(Chunk(piece, (0.0,) * len(piece), None, finish, None))
    message = answer.message()
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == arguments
    assert {call["function"]["name"] for call in message["tool_calls"]} == {"bash"}
    assert answer.finish_reason == "tool_calls"
    assert message["content"] == ("Sure.\n" if name == "parallel" else None)
    assert "null" not in json.dumps(deltas)


async def test_a_cut_inside_a_tool_call_stays_length(qwen_engine: RealEngine, http: EngineHttp) -> None:
    replica = await connect(qwen_engine, http)
    body = {"model": qwen_engine.model, "messages": STORY, "tools": [TOOL]}
    rendered = await replica.render(body)
    ids = await tokenized(replica, http, qwen_engine.model, '<tool_call>\n{"name": "bash", "arguments": {"a": "ls -l')
    answer = AnswerStream(
        replica.derenderer(qwen_engine.model, "q", derender_request(body), rendered.ids), clock=time.monotonic
    )
    await answer.feed(Chunk(tuple(ids), (0.0,) * len(ids), None, "length", None))
    assert answer.finish_reason == "length"
    assert answer.message()["tool_calls"][0]["function"]["arguments"] == '{"a": "ls -l'


PLAIN_ANSWERS = (
    "Hello there.\n\nHere is the code:\n```python\nif a < b and x[0] <= {1: 2}[1]:\n    print('<b>é日本語🎉')\n```\n",
    '{"name": "bash", "arguments": {"a": "ls"}} is how a call would look, as [bash(a=1)] or <function bash> would.',
    "  leading blanks, a <tool that is none, a </think> and <think> of no thinking, \u200d\ufeff and a tail \n \n",
)


async def test_text_ahead_is_what_derender_says(qwen_engine: RealEngine, http: EngineHttp) -> None:
    replica = await connect(qwen_engine, http)
    assert replica.capabilities is not None
    assert replica.capabilities.plain_until_marked
    listed = await http.get(f"{replica.url}/v1/models")
    replica.tokenizer = Tokenizer.from_file(f"{listed['data'][0]['root']}/tokenizer.json")
    replica.markers = frozenset(replica.tokenizer.get_added_tokens_decoder())
    body = {"model": qwen_engine.model, "messages": STORY, "tools": [TOOL]}
    prompt = (await replica.render(body)).ids
    (end,) = await tokenized(replica, http, qwen_engine.model, "<|im_end|>")
    for text in (
        *PLAIN_ANSWERS,
        *(f"{text[:30]} {call}" for text in PLAIN_ANSWERS for call, _ in TOOL_ANSWERS.values()),
    ):
        ids = [*await tokenized(replica, http, qwen_engine.model, text), end]
        said = []
        for size, ahead in ((len(ids), None), (3, replica.text_ahead(prompt)), (len(ids), replica.text_ahead(prompt))):
            derender = replica.derenderer(qwen_engine.model, "q", derender_request(body), prompt)
            answer = AnswerStream(derender, clock=time.monotonic, mint=lambda: "c", whole=size == len(ids), ahead=ahead)
            for at in range(0, len(ids), size):
                last = "stop" if at + size >= len(ids) else None
                await answer.feed(Chunk(tuple(ids[at : at + size]), (), None, last, None))
            assert answer.agreed
            said.append((answer.message(), answer.finish_reason))
        assert said[0] == said[1] == said[2]
