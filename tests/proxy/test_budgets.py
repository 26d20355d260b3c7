"""A run that spent its budget, or its context, ends with last words in its dialect and is flagged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import FindModel
from tests.fake_engine.runner import FakeEngine
from tests.fake_engine.settings import FakeSettings
from tests.gateway_process import GatewayProcess
from tests.proxy.conftest import StartFake, StartGateway
from tests.proxy.sdks import SDKS
from turngate.proxy import wire
from turngate.proxy.budgets import CONTEXT_OVERFLOW, CONTEXT_TOKENS, GENERATED_TOKENS, room_for
from turngate.proxy.store.reader import StoreReader
from turngate.proxy.wire import Budgets

LONG = "word " * 40
"""An answer of far more than eight tokens."""


def budgets(**limits: Any) -> Budgets:
    """Budgets of a session."""
    return Budgets.model_validate(limits)


def flags_of(gateway: GatewayProcess, rollout: str) -> list[str]:
    """Finish a rollout; what it is flagged with."""
    return list(gateway.client.finish_rollout(rollout, wire.FinishRollout(reward=0.0)).metrics["flags"])


@given(
    prompt=st.integers(0, 200), generated=st.integers(0, 200), context=st.integers(1, 100), tokens=st.integers(1, 100)
)
def test_the_room_is_what_the_tightest_limit_leaves(prompt: int, generated: int, context: int, tokens: int) -> None:
    room = room_for(budgets(max_context_tokens=context, max_generated_tokens=tokens), 80, prompt, generated)
    left = {CONTEXT_OVERFLOW: 80 - prompt, CONTEXT_TOKENS: context - prompt, GENERATED_TOKENS: tokens - generated}
    assert room.tokens == min(left.values()) == left[room.cause]
    assert room_for(budgets(), 80, prompt, generated).tokens == 80 - prompt


def test_an_answer_fills_its_room_only_when_it_was_cut_there() -> None:
    room = room_for(budgets(max_generated_tokens=8), 100, 10, 0)
    assert room.cut(8, "length")
    assert not room.cut(8, "stop")
    assert not room.cut(5, "length")


@pytest.fixture(scope="module")
def short(model_dir: FindModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway before an engine of a short context and long answers."""
    settings = FakeSettings(max_model_len=512)
    with (
        FakeEngine(model_dir("qwen-coder-0.5b"), [LONG], settings=settings) as fake,
        GatewayProcess(fake.url, tmp_path_factory.mktemp("short") / "store") as gateway,
    ):
        yield gateway


@pytest.mark.parametrize("dialect", list(SDKS))
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_every_dialect_ends_a_run_by_each_cause_with_its_word_for_a_whole_answer(
    short: GatewayProcess, dialect: str, stream: bool
) -> None:
    ask, whole, cut = SDKS[dialect]

    def ended(text: str, *before: str, **limits: Any) -> list[str]:
        """What the rollout is flagged with when `text` is asked in the end, three times over."""
        created, _ = short.session(budgets=limits)
        assert [ask(created, one, stream=stream)[1] for one in before] == [cut for _ in before]
        for _ in range(3):
            words, reason = ask(created, text, stream=stream)
            assert reason == whole
            assert words.endswith("ends here.")
        with StoreReader(short.store) as reader:
            assert len(reader.turns(created.id)) == len(before), "last words are no turns"
        return flags_of(short, created.id)

    assert ended("word " * 800) == ["context_overflow"]
    assert ended("word " * 90, max_context_tokens=80) == ["budget:context_tokens"]
    assert ended("Again.", "Hi", max_generated_tokens=8) == ["budget:generated_tokens"]


def test_a_turn_never_samples_more_than_is_left_and_one_that_is_cut_there_is_flagged_at_once(
    start_fake: StartFake, start_gateway: StartGateway
) -> None:
    ask, _, cut = SDKS["chat"]
    gateway = start_gateway(start_fake([LONG]).url)
    created, _ = gateway.session(budgets={"max_generated_tokens": 12}, sampling={"max_tokens": 8})
    assert ask(created, "Hi", stream=True)[1] == cut
    assert ask(created, "Hi", stream=True)[1] == cut
    with StoreReader(gateway.store) as reader:
        assert [len(turn.completion_ids) for turn in reader.turns(created.id)] == [8, 4]
    assert ask(created, "Hi", stream=True)[1] == "stop"
    told = httpx.get(f"{gateway.url}/metrics").text
    assert 'turngate_runs_ended_total{cause="budget:generated_tokens"} 1' in told
    assert flags_of(gateway, created.id) == ["budget:generated_tokens"]


def test_an_engine_that_only_chats_keeps_them_too(start_fake: StartFake, start_gateway: StartGateway) -> None:
    gateway = start_gateway(start_fake([LONG], settings=FakeSettings(exact=False)).url)
    created, client = gateway.session(budgets={"max_generated_tokens": 60, "max_context_tokens": 70})
    asked: list[Any] = [{"role": "user", "content": "Hi"}]
    reasons = []
    for _ in range(3):
        choice = client.chat.completions.create(model="m", messages=asked).choices[0]
        asked += [choice.message.model_dump(exclude_none=True), {"role": "user", "content": "Go on."}]
        reasons.append(choice.finish_reason)
    assert reasons[-1] == "stop"
    assert choice.message.content == "The context budget of this run is spent, so it ends here."
    with StoreReader(gateway.store) as reader:
        assert sum(len(turn.completion_ids) for turn in reader.turns(created.id)) <= 60
