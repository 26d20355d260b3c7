"""The gateway before vLLM 0.26: derender takes whole answers only, log-probs are named, stop reasons are missing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fake_engine.runner import FakeEngine
from tests.fake_engine.settings import FakeSettings
from tests.gateway_process import GatewayProcess
from tests.proxy.conftest import Gate
from tests.proxy.test_chat_api import TOOLS, ask, streamed, turns_of
from turngate.proxy.store.layout import StoreFolder
from turngate.proxy.verify import verify_store


@pytest.fixture(scope="module")
def old(model_dir: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    folder: Path = model_dir("qwen-coder-0.5b")
    options = ("--tokenizer", str(folder))
    with (
        FakeEngine(folder, ["Hello."], settings=FakeSettings(old_wire=True, tokens_per_s=60.0)) as fake,
        GatewayProcess(fake.url, tmp_path_factory.mktemp("old") / "store", *options) as gateway,
    ):
        yield Gate(fake, gateway)


def test_it_is_exact_and_plain_text_streams(old: Gate) -> None:
    gateway = old.says(["Words that come one after another, so that there is something to stream. " * 3])
    created, client = gateway.session()
    pieces, events = streamed(client, **ask("Hi"))
    assert pieces["content"].startswith("Words that come")
    assert sum(bool(choice.delta.content) for event in events for choice in event.choices) >= 5
    (turn,) = turns_of(gateway, created.id)
    assert turn.mode == "exact"
    assert len(turn.logprobs) == len(turn.completion_ids)
    assert int(turn.completion_ids[-1]) in StoreFolder.find(gateway.store).stop_ids()


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_come_whole_and_no_marker_leaks(old: Gate, stream: bool) -> None:
    gateway = old.says([{"content": "Look.", "tool_calls": [{"name": "read", "arguments": '{"a":  1}'}]}])
    _, client = gateway.session()
    if stream:
        pieces, _ = streamed(client, **ask("Go", tools=TOOLS))
        content, finish, calls = pieces["content"], pieces["finish"], list(pieces["calls"].values())
    else:
        choice = client.chat.completions.create(**ask("Go", tools=TOOLS)).choices[0]
        content, finish = choice.message.content or "", choice.finish_reason
        calls = [{"name": c.function.name, "arguments": c.function.arguments} for c in choice.message.tool_calls or ()]
    assert content.strip() == "Look."
    assert finish == "tool_calls"
    assert [(call["name"], call["arguments"]) for call in calls] == [("read", '{"a": 1}')]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_is_cut_though_the_engine_does_not_say_which(old: Gate, stream: bool) -> None:
    gateway = old.says(["one two STOPPED three"])
    body = ask("Count", stop=["STOPPED", "never"])
    if stream:
        content = streamed(gateway.session()[1], **body)[0]["content"]
    else:
        content = gateway.session()[1].chat.completions.create(**body).choices[0].message.content
    assert content == "one two "


def test_the_alternatives_and_the_history_are_exact(old: Gate) -> None:
    gateway = old.says(["First.", "Second."])
    created, client = gateway.session(top_logprobs=2)
    message = client.chat.completions.create(**ask("Hi")).choices[0].message
    echo = {"role": "assistant", "content": message.content}
    client.chat.completions.create(
        model="m", messages=[*ask("Hi")["messages"], echo, {"role": "user", "content": "And?"}]
    )
    one, two = turns_of(gateway, created.id)
    assert one.top_ids is not None
    assert one.top_ids.shape == (len(one.completion_ids), 2)
    assert two.kind == "spliced"
    assert verify_store(gateway.store).problems == []
