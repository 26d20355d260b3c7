"""Answers that outlive their engine, against two fake engines: the same text and tokens wherever it breaks."""

from __future__ import annotations

import asyncio
import pathlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.fake_engine import FakeEngine, FakeSettings, Fault, Script
from turngate.proxy.engine import AnswerStream, EngineFault, EngineHttp, EngineUnavailable, GenerateCall, Replicas
from turngate.proxy.engine.continuation import Stretch
from turngate.proxy.engine.failover import MAX_FAILURES, Failover, SessionEngines
from turngate.proxy.engine.wire import derender_request
from turngate.proxy.tokenizer import plain_decode

HELLO = [{"role": "user", "content": "Hello"}]
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}]
TEXTS = (
    "one two three four five six seven eight nine ten",
    "Größe: 3 €, naïve 日本語 — ok 🎉🎉 done",
    'I look.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls | wc"}}\n</tool_call>',
    "<think>Let me see.</think>The answer is END of it, then more END.",
)
BREAKS = ("error", "drop", "abort", "cut")


@dataclass
class Pair:
    """Two fake engines and the way to them."""

    fakes: list[FakeEngine]
    failover: Failover
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)

    async def call(self, **params: Any) -> GenerateCall:
        rendered = await self.failover.of("s").render({"model": "fake", "messages": HELLO, "tools": TOOLS})
        return GenerateCall("fake", rendered.ids, {**rendered.sampling_params, **params}, rendered.extra, "r1", 2)

    def reset(self, *faults: Fault | None) -> None:
        """The session begins anew at the first engine; what goes wrong next, an engine each."""
        self.failover.replicas.release("s")
        self.failover.replicas.pick("s", exclude={replica.name for replica in self.failover.replicas.all[1:]})
        for fake, fault in zip(self.fakes, faults, strict=True):
            fake.fail(fault)


@dataclass
class Told:
    """What a client and the record get."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    message: dict[str, Any] = field(default_factory=dict)
    streamed: str = ""
    finish_reason: str | None = None
    stop_reason: Any = None
    stretches: tuple[Stretch, ...] = ()

    @property
    def meant(self) -> tuple[Any, ...]:
        """All but the ids of tool calls."""
        calls = [(one["function"]["name"], one["function"]["arguments"]) for one in self.message.get("tool_calls", ())]
        texts = {key: value for key, value in self.message.items() if key != "tool_calls"}
        return self.ids, self.logprobs, texts, calls, self.streamed, self.finish_reason, self.stop_reason


async def tell(engines: SessionEngines, call: GenerateCall, *, stop: tuple[str, ...] = ()) -> Told:
    told = Told()
    about = derender_request({"tools": TOOLS})
    derender = engines.derenderer("fake", "r1", about, call.ids)
    stream = AnswerStream(derender, stop=stop, clock=time.monotonic, ahead=engines.text_ahead(call.ids))
    async with aclosing(engines.generate(call)) as chunks:
        async for chunk in chunks:
            told.ids += chunk.ids
            told.logprobs += chunk.logprobs
            told.stop_reason = chunk.stop_reason
            told.streamed += "".join(str(delta.get("content", "")) for delta in await stream.feed(chunk))
    assert stream.agreed
    told.message, told.finish_reason, told.stretches = stream.message(), stream.finish_reason, engines.stretches
    return told


@pytest.fixture(scope="module")
def folder(model_dir: Callable[[str], pathlib.Path]) -> pathlib.Path:
    return model_dir("qwen-coder-0.5b")


@pytest.fixture(scope="module")
def tokenizer(folder: pathlib.Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def fakes(folder: pathlib.Path) -> Iterator[list[FakeEngine]]:
    with FakeEngine(folder, ["Hi."]) as one, FakeEngine(folder, ["Hi."]) as two:
        yield [one, two]


@asynccontextmanager
async def pair_of(
    fakes: list[FakeEngine], tokenizer: Tokenizer, *, wait_s: float = 20.0, silence_s: float = 60.0
) -> AsyncIterator[Pair]:
    counts: Counter[tuple[str, str]] = Counter()

    def count(metric: str, engine: str) -> None:
        counts[metric, engine] += 1

    http = EngineHttp(connect_timeout_s=2.0, read_timeout_s=silence_s)
    urls = [fake.url for fake in fakes]
    replicas = Replicas(urls, http, health_interval_s=0.05, count=count)
    await replicas.start(wait_s=10)
    replicas.set_tokenizer(tokenizer, frozenset(tokenizer.get_added_tokens_decoder()))
    ends = frozenset({fakes[0].engine.tokens.eos_id})
    try:
        yield Pair(fakes, Failover(replicas, wait_s, plain_decode(tokenizer), ends, count), counts)
    finally:
        await replicas.stop()
        await http.aclose()


@pytest.mark.parametrize("kind", [*BREAKS, "refuse"])
async def test_an_answer_goes_on_with_the_other_engine(
    kind: Any, fakes: list[FakeEngine], tokenizer: Tokenizer
) -> None:
    async with pair_of(fakes, tokenizer) as pair:
        for fake in fakes:
            fake.engine.script = Script.of([TEXTS[0]])
        pair.reset(None, None)
        whole = await tell(pair.failover.of("s"), await pair.call())
        pair.reset(Fault(kind, after_tokens=4), None)
        fakes[1].engine.requests.clear()
        broken = await tell(pair.failover.of("s"), await pair.call(max_tokens=50, min_tokens=6))
        assert broken.meant == whole.meant
        (asked,) = fakes[1].seen("/inference/v1/generate")
        if kind == "refuse":
            assert broken.stretches == (Stretch(0, len(whole.ids), "engine-1"),)
            assert asked["sampling_params"]["max_tokens"] == 50
            assert pair.counts["turngate_continuations_total", "engine-0"] == 0
        else:
            assert broken.stretches == (Stretch(0, 4, "engine-0"), Stretch(4, len(whole.ids), "engine-1"))
            assert asked["sampling_params"]["max_tokens"] == 46
            assert asked["sampling_params"]["min_tokens"] == 2
            assert pair.counts["turngate_continuations_total", "engine-0"] == 1
        assert pair.counts["turngate_failovers_total", "engine-0"] == 1


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.sampled_from(TEXTS),
    seams=st.tuples(st.integers(0, 14), st.integers(1, 6)),
    kinds=st.tuples(st.sampled_from(BREAKS), st.sampled_from(BREAKS)),
    stop=st.lists(st.sampled_from(["END", "four five", "wo th", "€, n", "語 — ", "wc", "e"]), max_size=2, unique=True),
    limit=st.integers(3, 40),
)
def test_a_broken_answer_is_the_answer_without_the_break(
    text: str,
    seams: tuple[int, int],
    kinds: tuple[Any, Any],
    stop: list[str],
    limit: int,
    fakes: list[FakeEngine],
    tokenizer: Tokenizer,
) -> None:
    async def both() -> tuple[Told, Told]:
        async with pair_of(fakes, tokenizer) as pair:
            for fake in fakes:
                fake.engine.script = Script.of([text])
            pair.reset(None, None)
            call = await pair.call(max_tokens=limit, stop=stop)
            whole = await tell(pair.failover.of("s"), call, stop=tuple(stop))
            pair.reset(Fault(kinds[0], seams[0]), Fault(kinds[1], seams[1]))
            return whole, await tell(pair.failover.of("s"), call, stop=tuple(stop))

    whole, broken = asyncio.run(both())
    assert broken.meant == whole.meant


@pytest.mark.parametrize("seed", [None, 5])
async def test_the_first_token_after_a_seam_is_not_the_answers_first_one_more_often_than_chance(
    seed: int | None, folder: pathlib.Path, tokenizer: Tokenizer
) -> None:
    """Engines that draw as vLLM does: by the request's seed, or by their own generator, begun anew at each start."""
    draws = FakeSettings(draws=8)
    repeated, turns = 0, 160
    with FakeEngine(folder, settings=draws) as one, FakeEngine(folder, settings=draws) as two:
        async with pair_of([one, two], tokenizer) as pair:
            for turn in range(turns):
                for fake in (one, two):
                    fake.engine._draw.seed(0)  # as just started
                pair.reset(Fault("error", after_tokens=1 + turn % 5), None)
                call = await pair.call(max_tokens=7, **({} if seed is None else {"seed": seed + turn}))
                engines = pair.failover.of("s")
                ids: list[int] = []
                async for chunk in engines.generate(GenerateCall(**{**_fields(call), "request_id": f"turn-{turn}"})):
                    ids += chunk.ids
                start = engines.stretches[1].start
                assert len(ids) == 7
                repeated += ids[start] == ids[0]
    # Binomial(160, 1/8): mean 20, standard deviation 4.2; the same draws again would give 160.
    assert 5 <= repeated <= 37


def _fields(call: GenerateCall) -> dict[str, Any]:
    return {name: getattr(call, name) for name in call.__slots__}


async def test_an_engine_that_falls_silent_is_left(fakes: list[FakeEngine], tokenizer: Tokenizer) -> None:
    async with pair_of(fakes, tokenizer, silence_s=0.5) as pair:
        for fake in fakes:
            fake.engine.script = Script.of([TEXTS[0]])
        pair.reset(Fault("stall", after_tokens=4), None)
        told = await tell(pair.failover.of("s"), await pair.call())
        assert told.message["content"] == TEXTS[0]
        assert [one.engine for one in told.stretches] == ["engine-0", "engine-1"]


@pytest.mark.parametrize("params", [{"presence_penalty": 0.5}, {"frequency_penalty": 0.5}, {"bad_words": ["x y"]}])
async def test_what_counts_output_only_is_a_fault_and_not_another_distribution(
    params: dict[str, Any], fakes: list[FakeEngine], tokenizer: Tokenizer
) -> None:
    async with pair_of(fakes, tokenizer) as pair:
        for fake in fakes:
            fake.engine.script = Script.of([TEXTS[0]])
        pair.reset(Fault("error", after_tokens=4), None)
        with pytest.raises(EngineFault, match=next(iter(params))):
            await tell(pair.failover.of("s"), await pair.call(**params))
        pair.reset(Fault("error", after_tokens=0), None)
        assert (await tell(pair.failover.of("s"), await pair.call(**params))).finish_reason == "stop"


async def test_a_request_that_kills_engines_is_given_up(fakes: list[FakeEngine], tokenizer: Tokenizer) -> None:
    async with pair_of(fakes, tokenizer) as pair:
        pair.reset(Fault("drop", after_tokens=0, times=-1), Fault("drop", after_tokens=0, times=-1))
        with pytest.raises(EngineUnavailable):
            await tell(pair.failover.of("s"), await pair.call())
        assert sum(n for (name, _), n in pair.counts.items() if name == "turngate_failovers_total") == MAX_FAILURES
        pair.reset(None, None)


async def test_an_answer_waits_for_the_only_engine_to_come_back_with_its_adapters(
    folder: pathlib.Path, tokenizer: Tokenizer, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    slow = FakeSettings(tokens_per_s=50.0)
    fake = FakeEngine(folder, [TEXTS[0]], settings=slow).__enter__()
    async with pair_of([fake], tokenizer) as pair:
        await pair.failover.replicas.load_adapter_everywhere("a-v1", str(tmp_path))
        call = GenerateCall(**{**_fields(await pair.call()), "model": "a-v1"})
        engines = pair.failover.of("s")
        telling = asyncio.create_task(tell(engines, call))
        while not engines.stretches:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(fake.stop)
        while pair.failover.replicas.healthy:
            await asyncio.sleep(0.01)
        with FakeEngine(folder, [TEXTS[0]], settings=slow, port=fake.port) as again:
            told = await asyncio.wait_for(telling, 60)
            assert list(again.engine.adapters) == ["a-v1"]
    assert told.message["content"] == TEXTS[0]
    assert [one.engine for one in told.stretches] == ["engine-0", "engine-0"]


async def test_no_engine_within_the_limit_is_an_error(folder: pathlib.Path, tokenizer: Tokenizer) -> None:
    fake = FakeEngine(folder, [TEXTS[0]]).__enter__()
    async with pair_of([fake], tokenizer, wait_s=0.2) as pair:
        call = await pair.call()
        await asyncio.to_thread(fake.stop)
        with pytest.raises(EngineUnavailable, match=r"within 0\.2 s") as raised:
            await tell(pair.failover.of("s"), call)
    assert str(fake.port) not in str(raised.value)


async def test_an_engine_that_returns_as_another_model_is_not_used(folder: pathlib.Path, tokenizer: Tokenizer) -> None:
    fake = FakeEngine(folder, ["Hi."]).__enter__()
    async with pair_of([fake], tokenizer, wait_s=0.5) as pair:
        await asyncio.to_thread(fake.stop)
        await pair.failover.replicas.check_health()
        with FakeEngine(folder, ["Hi."], settings=FakeSettings(model="other"), port=fake.port):
            await pair.failover.replicas.check_health()
            assert pair.failover.replicas.healthy == ()


async def test_an_adapter_published_while_an_engine_is_away_is_there_when_it_returns(
    folder: pathlib.Path, tokenizer: Tokenizer, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    one, two = (FakeEngine(folder, ["Hi."]).__enter__() for _ in range(2))
    async with pair_of([one, two], tokenizer) as pair:
        await asyncio.to_thread(two.stop)  # nobody has noticed yet
        await pair.failover.replicas.load_adapter_everywhere("a-v1", str(tmp_path))
        assert [replica.name for replica in pair.failover.replicas.healthy] == ["engine-0"]
        with FakeEngine(folder, ["Hi."], port=two.port) as again:
            await pair.failover.replicas.check_health()
            assert len(pair.failover.replicas.healthy) == 2
            assert list(again.engine.adapters) == ["a-v1"]
    one.stop()
