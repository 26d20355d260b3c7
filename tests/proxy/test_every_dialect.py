"""What every dialect must do alike: stream while the engine samples, hide its faults, and tell those it cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import anthropic
import openai
import pytest
from google import genai
from google.genai import errors

from tests.fake_engine.settings import FakeSettings, Fault
from tests.gateway_process import GatewayProcess
from tests.proxy.conftest import Gate, StartFake, StartGateway
from tests.proxy.sdks import SDKS
from turngate.proxy import wire
from turngate.proxy.store.reader import StoreReader
from turngate.proxy.turns import Turn

WORDS = "one two three four five six seven eight nine ten eleven twelve"
HI: Any = [{"role": "user", "content": "Hi"}]
WAYS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
DIALECTS = pytest.mark.parametrize("dialect", list(SDKS))
REFUSALS = (openai.APIStatusError, anthropic.APIStatusError, errors.APIError)


def chat_pieces(url: str) -> Iterator[str]:
    client = openai.OpenAI(base_url=url, api_key="k", max_retries=0)
    for event in client.chat.completions.create(model="m", messages=HI, stream=True):
        yield from (choice.delta.content or "" for choice in event.choices)


def responses_pieces(url: str) -> Iterator[str]:
    client = openai.OpenAI(base_url=url, api_key="k", max_retries=0)
    for event in client.responses.create(model="m", input="Hi", stream=True):
        yield event.delta if event.type == "response.output_text.delta" else ""


def messages_pieces(url: str) -> Iterator[str]:
    client = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="k", max_retries=0)
    with client.messages.stream(model="m", max_tokens=500, messages=HI) as events:
        yield from events.text_stream


def gemini_pieces(url: str) -> Iterator[str]:
    client = genai.Client(api_key="k", http_options=genai.types.HttpOptions(base_url=url))
    for event in client.models.generate_content_stream(model="m", contents="Hi"):
        yield event.text or ""


PIECES: dict[str, Callable[[str], Iterator[str]]] = {
    "chat": chat_pieces,
    "responses": responses_pieces,
    "messages": messages_pieces,
    "gemini": gemini_pieces,
}


def turns_of(gateway: GatewayProcess, rollout: str) -> list[Turn]:
    """What was kept of a rollout."""
    with StoreReader(gateway.store) as store:
        return store.turns(rollout)


@DIALECTS
def test_the_first_text_is_told_while_the_engine_is_still_sampling(
    dialect: str, start_fake: StartFake, start_gateway: StartGateway
) -> None:
    fake = start_fake([WORDS], settings=FakeSettings(tokens_per_s=5.0))
    created, _ = start_gateway(fake.url).session()
    pieces = PIECES[dialect](created.base_url)
    first = next(piece for piece in pieces if piece)
    assert fake.engine.running
    fake.engine.settings = FakeSettings()
    assert "".join(chain([first], pieces)) == WORDS


@DIALECTS
@WAYS
def test_an_engine_that_dies_twice_midway_is_not_seen_by_the_client(gate: Gate, dialect: str, stream: bool) -> None:
    gateway = gate.says([WORDS])
    gate.fake.fail(Fault("error", after_tokens=4, times=2))
    created, _ = gateway.session()
    ask, whole, _ = SDKS[dialect]
    assert ask(created, "Hi", stream=stream) == (WORDS, whole)
    (turn,) = turns_of(gateway, created.id)
    ends = [0, *(span.end for span in turn.spans)]
    assert [span.start for span in turn.spans] == ends[:-1]
    assert (len(turn.spans), ends[-1]) == (3, len(turn.completion_ids))
    assert turn.flags == ("continued",)


@DIALECTS
@WAYS
def test_without_an_engine_the_client_gets_a_status_and_the_rollout_no_score(
    gate: Gate, dialect: str, stream: bool
) -> None:
    gateway = gate.says([WORDS])
    gate.fake.fail(Fault("refuse", times=-1))
    created, _ = gateway.session()
    with pytest.raises(REFUSALS) as refused:
        SDKS[dialect][0](created, "Hi", stream=stream)
    assert (getattr(refused.value, "status_code", None) or getattr(refused.value, "code", None)) in (502, 503)
    finished = gateway.client.finish_rollout(created.id, wire.FinishRollout(reward=1.0))
    assert (finished.turns, finished.outcome, finished.cause, finished.reward) == (
        0,
        "unscorable",
        "engine_fault",
        None,
    )


@DIALECTS
def test_an_answer_that_nobody_can_end_is_a_fault_after_its_first_words_and_the_rollout_gets_no_score(
    gate: Gate, dialect: str
) -> None:
    gateway = gate.says([WORDS * 4])
    gate.fake.fail(Fault("error", after_tokens=4, times=-1))
    created, _ = gateway.session()
    said, fault = "", ""
    try:
        for piece in PIECES[dialect](created.base_url):
            said += piece
    except (openai.APIError, anthropic.APIError, errors.APIError) as error:
        fault = str(error)
    assert said
    assert WORDS.startswith(said) or said.startswith(WORDS)
    assert "engine-0" in fault or dialect == "responses"  # whose last event says so
    finished = gateway.client.finish_rollout(created.id, wire.FinishRollout(reward=1.0))
    assert (finished.turns, finished.outcome, finished.cause) == (0, "unscorable", "engine_fault")
