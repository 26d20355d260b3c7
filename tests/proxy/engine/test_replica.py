"""The engine client against the fake engine: what it finds out, what it passes on, how it fails."""

from __future__ import annotations

import asyncio
import pathlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from typing import Any

import pytest

from tests.fake_engine import FakeEngine, FakeSettings, Fault
from turngate.proxy.engine import (
    ContextOverflow,
    EngineError,
    EngineFault,
    EngineHttp,
    EngineRefused,
    EngineUnavailable,
    GenerateCall,
    Replica,
    Replicas,
)
from turngate.proxy.engine.types import Chunk

HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}
StartFake = Callable[..., FakeEngine]


@pytest.fixture
async def http() -> AsyncIterator[EngineHttp]:
    client = EngineHttp(connect_timeout_s=2.0)
    yield client
    await client.aclose()


@pytest.fixture
def start_fake(model_dir: Callable[[str], pathlib.Path]) -> Iterator[StartFake]:
    """`start_fake(script, **settings)`: a fake engine with SmolLM2's tokenizer and the reasoning template."""
    started: list[FakeEngine] = []

    def start(script: Any = None, **settings: Any) -> FakeEngine:
        folder = model_dir("smollm2-135m")
        fake = FakeEngine(folder, script, template="drop-reasoning", settings=FakeSettings(**settings))
        started.append(fake)
        return fake.__enter__()

    yield start
    for fake in started:
        fake.stop()


async def call_for(replica: Replica, *, top_logprobs: int = 0, **params: Any) -> GenerateCall:
    rendered = await replica.render({"model": "fake", "messages": HELLO})
    params = {**rendered.sampling_params, **params}
    return GenerateCall("fake", rendered.ids, params, rendered.extra, "r1", top_logprobs)


async def all_chunks(replica: Replica, call: GenerateCall) -> list[Chunk]:
    return [chunk async for chunk in replica.generate(call)]


async def drain(source: AsyncIterator[Any], into: list[Any]) -> None:
    """Keep what came before an error, too."""
    async for one in source:
        into.append(one)


async def test_the_probe_finds_what_the_engine_can_do(start_fake: StartFake, http: EngineHttp) -> None:
    found = await Replica("r", start_fake(["Hi."], max_model_len=4096).url, http).probe()
    assert (found.model, found.max_model_len, found.vllm_version) == ("fake", 4096, "0.32.0")
    assert (found.exact, found.logprobs_mode, found.derender_tail_tokens) == (True, "processed", 8)
    assert (found.runtime_lora, found.max_loras, found.has_parser) == (True, 4, True)


async def test_log_probs_before_temperature_are_told_apart(start_fake: StartFake, http: EngineHttp) -> None:
    found = await Replica("r", start_fake(["Hi."], raw_logprobs=True).url, http).probe()
    assert found.logprobs_mode == "raw"


async def test_an_engine_without_the_three_calls_is_not_exact(start_fake: StartFake, http: EngineHttp) -> None:
    replicas = Replicas([start_fake(["Hi."], exact=False, runtime_lora=False).url], http)
    found = await replicas.start(wait_s=5)
    await replicas.stop()
    assert (found.exact, found.logprobs_mode, found.runtime_lora) == (False, "unknown", False)
    assert "--enable-scale-out" in replicas.warnings()[0]
    with pytest.raises(EngineError, match="--enable-scale-out"):
        await replicas.start(wait_s=5, require_exact=True)


async def test_tokens_come_with_the_stop_token_and_one_log_prob_each(start_fake: StartFake, http: EngineHttp) -> None:
    fake = start_fake(["Hello there."], chunk_tokens=2)
    replica = Replica("r", fake.url, http)
    chunks = await all_chunks(replica, await call_for(replica, top_logprobs=3))
    ids = [token for chunk in chunks for token in chunk.ids]
    assert ids == [*fake.engine.tokens.encode("Hello there."), fake.engine.tokens.eos_id]
    assert (chunks[-1].finish_reason, chunks[-1].stop_reason) == ("stop", None)
    for chunk in chunks:
        assert chunk.top is not None
        assert [len(pairs) for pairs in chunk.top] == [3] * len(chunk.ids)
        assert all(logprob < 0 for logprob in chunk.logprobs)
    assert replica.in_flight == 0


@pytest.mark.parametrize("kind", ["error", "drop", "abort"])
async def test_a_stream_that_breaks_is_a_fault_and_its_tokens_stay(
    start_fake: StartFake, http: EngineHttp, kind: Any
) -> None:
    fake = start_fake(["one two three four five six seven"])
    replica = Replica("r", fake.url, http)
    call = await call_for(replica)
    fake.fail(Fault(kind, after_tokens=3))
    chunks: list[Chunk] = []
    with pytest.raises(EngineFault):
        await drain(replica.generate(call), chunks)
    seen = [token for chunk in chunks for token in chunk.ids]
    assert seen == fake.engine.tokens.encode("one two three four five six seven")[:3]
    assert replica.in_flight == 0


async def test_a_stream_that_fails_before_its_first_token_is_unavailable(
    start_fake: StartFake, http: EngineHttp
) -> None:
    fake = start_fake(["Hi."])
    replica = Replica("r", fake.url, http)
    call = await call_for(replica)
    fake.fail(Fault("error", after_tokens=0))
    with pytest.raises(EngineUnavailable, match="500"):
        await all_chunks(replica, call)


async def test_a_refusing_engine_is_unavailable(start_fake: StartFake, http: EngineHttp) -> None:
    fake = start_fake(["Hi."])
    replica = Replica("r", fake.url, http)
    call = await call_for(replica)
    fake.fail(Fault("refuse"))
    with pytest.raises(EngineUnavailable, match="500"):
        await all_chunks(replica, call)


async def test_closing_the_generator_aborts_in_the_engine(start_fake: StartFake, http: EngineHttp) -> None:
    fake = start_fake(tokens_per_s=20)
    replica = Replica("r", fake.url, http)
    async with aclosing(replica.generate(await call_for(replica))) as chunks:
        await anext(chunks)
        assert len(fake.engine.running) == 1
    async with asyncio.timeout(10):
        while fake.engine.running:
            await asyncio.sleep(0.01)
    assert fake.engine.aborted == 1


async def test_abort_by_id_ends_the_stream(start_fake: StartFake, http: EngineHttp) -> None:
    fake = start_fake(tokens_per_s=20)
    replica = Replica("r", fake.url, http)
    async with aclosing(replica.generate(await call_for(replica))) as chunks:
        await anext(chunks)
        await replica.abort("r1")
        with pytest.raises(EngineFault, match="abort"):
            await drain(chunks, [])


async def test_what_does_not_fit_the_context_is_told_apart(start_fake: StartFake, http: EngineHttp) -> None:
    replica = Replica("r", start_fake(["Hi."], max_model_len=64).url, http)
    await replica.probe()
    with pytest.raises(ContextOverflow):
        await replica.render({"model": "fake", "messages": [{"role": "user", "content": "word " * 100}]})
    call = await call_for(replica)
    too_long = GenerateCall("fake", call.ids.repeat(10), call.sampling_params, {}, "r2")
    with pytest.raises(ContextOverflow):
        await all_chunks(replica, too_long)


async def test_a_huge_token_limit_becomes_what_fits(start_fake: StartFake, http: EngineHttp) -> None:
    replica = Replica("r", start_fake(["Hi."], max_model_len=100).url, http)
    await replica.probe()
    rendered = await replica.render({"model": "fake", "messages": HELLO, "max_tokens": 10**9})
    assert rendered.sampling_params["max_tokens"] == 100 - len(rendered.ids)


async def test_an_unknown_model_is_refused_with_its_name(start_fake: StartFake, http: EngineHttp) -> None:
    replica = Replica("r", start_fake(["Hi."]).url, http)
    with pytest.raises(EngineRefused, match="nobody") as caught:
        await replica.render({"model": "nobody", "messages": HELLO})
    assert caught.value.status == 404


async def test_nobody_there_is_unavailable(http: EngineHttp) -> None:
    replica = Replica("r", "http://127.0.0.1:9", http)
    assert await replica.health() == "down"
    with pytest.raises(EngineUnavailable, match=r"127\.0\.0\.1:9"):
        await replica.render({"messages": HELLO})
    with pytest.raises(EngineUnavailable, match="is it up"):
        await Replicas([replica.url], http).start(wait_s=0)


async def test_transparent_chat_brings_ids_and_log_probs(start_fake: StartFake, http: EngineHttp) -> None:
    fake = start_fake(["Hello there."], exact=False)
    replica = Replica("r", fake.url, http)
    body = {"model": "fake", "messages": HELLO, "seed": None}
    whole = await replica.chat(body)
    ids = [*fake.engine.tokens.encode("Hello there."), fake.engine.tokens.eos_id]
    assert whole["choices"][0]["token_ids"] == ids
    assert len(whole["choices"][0]["logprobs"]["content"]) == len(ids)
    streamed, prompt = [], None
    async for event in replica.chat_stream(body):
        prompt = prompt or event.get("prompt_token_ids")
        for choice in event["choices"]:
            streamed += choice.get("token_ids", [])
    assert (streamed, prompt) == (ids, whole["prompt_token_ids"])
    fake.fail(Fault("error"))
    with pytest.raises(EngineFault):
        await drain(replica.chat_stream(body), [])


async def test_adapters_load_unload_and_say_what_is_wrong(
    start_fake: StartFake, http: EngineHttp, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    replica = Replica("r", start_fake(["Hi."]).url, http)
    await replica.load_adapter("a-v1", str(tmp_path))
    await replica.load_adapter("a-v1", str(tmp_path))
    assert await replica.models() == ["fake", "a-v1"]
    with pytest.raises(EngineRefused, match="nothing-here"):
        await replica.load_adapter("a-v2", "nothing-here")
    await replica.unload_adapter("a-v1")
    await replica.unload_adapter("a-v1")
    assert await replica.models() == ["fake"]
    off = Replica("r", start_fake(["Hi."], runtime_lora=False).url, http)
    with pytest.raises(EngineRefused, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
        await off.load_adapter("a-v1", str(tmp_path))


async def test_sessions_stick_and_spread_and_leave_an_ill_replica(start_fake: StartFake, http: EngineHttp) -> None:
    fakes = [start_fake(["Hi."]) for _ in range(2)]
    replicas = Replicas([fake.url for fake in fakes], http, health_interval_s=3600)
    await replicas.start(wait_s=5)
    picked = [replicas.pick(f"s{i}") for i in range(4)]
    assert [replica.name for replica in picked] == ["engine-0", "engine-1", "engine-0", "engine-1"]
    assert replicas.pick("s1") is picked[1]
    assert replicas.pick("s1", exclude={"engine-1"}) is picked[0]
    replicas.mark_ill(picked[0])
    assert replicas.pick("s0") is picked[1]
    await replicas.check_health()
    assert len(replicas.healthy) == 2
    fakes[0].stop()
    fakes[1].stop()
    await replicas.check_health()
    with pytest.raises(EngineUnavailable, match="none of the 2"):
        replicas.pick("s0")
    await replicas.stop()


async def test_an_adapter_is_loaded_everywhere_or_nowhere(
    start_fake: StartFake, http: EngineHttp, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    fakes = [start_fake(["Hi."]), start_fake(["Hi."])]
    replicas = Replicas([fake.url for fake in fakes], http, health_interval_s=3600)
    await replicas.start(wait_s=5)
    await replicas.load_adapter_everywhere("a-v1", str(tmp_path))
    assert [list(fake.engine.adapters) for fake in fakes] == [["a-v1"], ["a-v1"]]
    with pytest.raises(EngineRefused):
        await replicas.load_adapter_everywhere("a-v2", "nothing-here")
    assert [list(fake.engine.adapters) for fake in fakes] == [["a-v1"], ["a-v1"]]
    replicas.mark_ill(replicas.all[0])
    fakes[0].engine.adapters.clear()
    await replicas.check_health()
    assert list(fakes[0].engine.adapters) == ["a-v1"], "a replica that comes back gets its adapters first"
    await replicas.unload_everywhere("a-v1")
    assert [list(fake.engine.adapters) for fake in fakes] == [[], []]
    await replicas.stop()


async def test_a_health_check_does_not_load_what_is_being_loaded(
    start_fake: StartFake, http: EngineHttp, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    fake = start_fake(["Hi."], load_s=1.0)
    replicas = Replicas([fake.url], http, health_interval_s=3600)
    await replicas.start(wait_s=5)
    loading = asyncio.create_task(replicas.load_adapter_everywhere("a-v1", str(tmp_path)))
    async with asyncio.timeout(10):
        while loads(fake) != ["a-v1"]:
            await asyncio.sleep(0.01)
    await replicas.check_health()
    assert not loading.done()
    await loading
    assert loads(fake) == ["a-v1"]
    fake.engine.adapters.clear()
    await replicas.check_health()
    assert loads(fake) == ["a-v1", "a-v1"], "one that an engine has lost is loaded again"
    await replicas.stop()


def loads(fake: FakeEngine) -> list[str]:
    """The adapters that the engine was asked to load."""
    return [body["lora_name"] for path, body in fake.engine.requests if path == "/v1/load_lora_adapter" and body]


async def test_engines_of_different_models_are_refused(start_fake: StartFake, http: EngineHttp) -> None:
    replicas = Replicas([start_fake(["Hi."]).url, start_fake(["Hi."], model="other").url], http)
    with pytest.raises(EngineError, match="different models"):
        await replicas.start(wait_s=5)


async def test_load_counts_running_generations(start_fake: StartFake, http: EngineHttp) -> None:
    replica = Replica("r", start_fake(tokens_per_s=20).url, http)
    async with aclosing(replica.generate(await call_for(replica))) as chunks:
        await anext(chunks)
        assert (await replica.load()).running == 1


async def test_connections_are_kept_from_turn_to_turn(start_fake: StartFake, http: EngineHttp) -> None:
    fake = start_fake(["Hello there."])
    replica = Replica("r", fake.url, http)
    call = await call_for(replica)
    for _ in range(3):
        await all_chunks(replica, call)
    assert fake.connections() == 1
