"""Clients that leave and ask again get the answer that was being made for them: one generation, one turn, one request.

With the official SDKs and their own timeouts and retries, in every dialect, streamed and whole.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest

from tests.conftest import FindModel
from tests.fake_engine.runner import FakeEngine
from tests.fake_engine.settings import Fault
from tests.gateway_process import GatewayProcess
from tests.proxy.conftest import Gate, StartFake, StartGateway
from tests.proxy.sdks import SDKS
from tests.proxy.test_faults import wait_for
from turngate.proxy import wire
from turngate.proxy.store.reader import StoreReader
from turngate.proxy.turns import Turn

WORDS = "one two three four five six seven eight nine ten eleven twelve"
CALL = {"content": WORDS, "tool_calls": [{"name": "bash", "arguments": '{ "n": 1.50, "command":"ls"}'}]}
SLOW_PER_S = 5.0
SHORT_S, TRIES = 0.8, 20
TALL = "/v1beta/models/m:"
HI = [{"role": "user", "content": "Hi"}]


@dataclass(frozen=True)
class Wire:
    """One dialect by hand: its paths, and a body for a text."""

    name: str
    path: str
    streamed_path: str
    body: Callable[[str], dict[str, Any]]

    def ask(self, base_url: str, text: str, *, stream: bool) -> tuple[str, dict[str, Any]]:
        """URL and body of one request."""
        body = self.body(text)
        if self.name == "gemini":
            return base_url.removesuffix("/v1") + (self.streamed_path if stream else self.path), body
        return base_url + self.path, {**body, "stream": stream}


WIRES = (
    Wire("chat", "/chat/completions", "", lambda text: {"messages": [{"role": "user", "content": text}]}),
    Wire("responses", "/responses", "", lambda text: {"input": text}),
    Wire(
        "messages", "/messages", "", lambda text: {"max_tokens": 500, "messages": [{"role": "user", "content": text}]}
    ),
    Wire(
        "gemini",
        f"{TALL}generateContent",
        f"{TALL}streamGenerateContent?alt=sse",
        lambda text: {"contents": [{"role": "user", "parts": [{"text": text}]}]},
    ),
)


@pytest.fixture(scope="module")
def gate(model_dir: FindModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    """A gateway that keeps what its clients left for long enough, however slow the machine is."""
    store = tmp_path_factory.mktemp("gate") / "store"
    with (
        FakeEngine(model_dir("qwen-coder-0.5b"), [WORDS]) as fake,
        GatewayProcess(fake.url, store, "--reattach-s", "60") as gateway,
    ):
        yield Gate(fake, gateway)


def slowly(gate: Gate, script: Any = (WORDS,)) -> GatewayProcess:
    """The engine says its script a few tokens a second."""
    gateway = gate.says(list(script))
    pace(gate.fake, SLOW_PER_S)
    gate.fake.engine.generations = gate.fake.engine.aborted = 0
    return gateway


def pace(fake: FakeEngine, tokens_per_s: float | None) -> None:
    fake.engine.settings = replace(fake.engine.settings, tokens_per_s=tokens_per_s)


def turns(gateway: GatewayProcess, rollout: str) -> list[Turn]:
    with StoreReader(gateway.store) as store:
        return store.turns(rollout)


def metric(gateway: GatewayProcess, name: str) -> int:
    found = re.findall(rf"^{name}(?:{{.*}})? (\d+)$", httpx.get(f"{gateway.url}/metrics").text, re.MULTILINE)
    return sum(map(int, found))


def unheard(gateway: GatewayProcess) -> int:
    return metric(gateway, "turngate_unheard_turns")


def leave(url: str, body: Mapping[str, Any], *, stream: bool, headers: Mapping[str, str] | None = None) -> bytes:
    """Ask, and hang up once the answer has begun (streamed) or after a moment (whole); what came until then."""
    if not stream:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url, json=body, headers=headers, timeout=SHORT_S)
        return b""
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as answer:
        return next(answer.iter_raw())


def get(url: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> httpx.Response:
    return httpx.post(url, json=body, headers=headers, timeout=120)


@pytest.mark.parametrize(
    ("wire_of", "left", "again"),
    [
        *[(wire_of, left, left) for wire_of in WIRES for left in (False, True)],
        *[(WIRES[0], True, False), (WIRES[1], False, True), (WIRES[2], True, False), (WIRES[3], False, True)],
    ],
    ids=lambda value: value.name if isinstance(value, Wire) else "streamed" if value else "whole",
)
def test_an_answer_left_midway_is_told_from_its_start_and_then_is_over(
    gate: Gate, wire_of: Wire, left: bool, again: bool
) -> None:
    gateway = slowly(gate, [CALL])
    created, _ = gateway.session(budgets={"max_requests": 2})
    began = leave(*wire_of.ask(created.base_url, "Hi", stream=left), stream=left)
    assert wait_for(lambda: unheard(gateway) == 1)
    retried = get(*wire_of.ask(created.base_url, "Hi", stream=again))
    (turn,) = turns(gateway, created.id)
    assert gate.fake.engine.generations == 1
    assert turn.id in retried.text
    if left and again:
        assert retried.content.startswith(began)
    pace(gate.fake, None)
    after = get(*wire_of.ask(created.base_url, "Hi", stream=again))
    assert [one.id in after.text for one in turns(gateway, created.id)] == [False, True]
    assert (gate.fake.engine.generations, gate.fake.engine.aborted, unheard(gateway)) == (2, 0, 0)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("dialect", list(SDKS))
def test_an_sdk_that_times_out_and_retries_by_itself_gets_one_generation(
    gate: Gate, dialect: str, stream: bool
) -> None:
    ask, whole, _ = SDKS[dialect]
    gateway = slowly(gate)
    if stream:  # SDKs retry until the head of the answer has come
        gate.fake.engine.settings = replace(gate.fake.engine.settings, latency_first_s=2.5, tokens_per_s=None)
    try:
        created, _ = gateway.session(budgets={"max_requests": 1, "max_concurrency": 1})
        before = metric(gateway, "turngate_reattached_total")
        assert ask(created, "Hi", stream=stream, idle_s=SHORT_S, retries=TRIES) == (WORDS, whole)
    finally:
        gate.fake.engine.settings = replace(gate.fake.engine.settings, latency_first_s=0.0)
    assert (len(turns(gateway, created.id)), gate.fake.engine.generations, gate.fake.engine.aborted) == (1, 1, 0)
    assert metric(gateway, "turngate_reattached_total") > before


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_finished_answer_that_nobody_heard_waits_unkept_until_it_is_asked_for(gate: Gate, stream: bool) -> None:
    gateway = slowly(gate)
    created, _ = gateway.session()
    url, body = WIRES[0].ask(created.base_url, "Hi", stream=stream)
    leave(url, body, stream=stream)
    pace(gate.fake, None)
    assert wait_for(lambda: not gate.fake.engine.running)
    assert (turns(gateway, created.id), unheard(gateway), gate.fake.engine.aborted) == ([], 1, 0)
    retried = get(url, body)
    (turn,) = turns(gateway, created.id)
    assert turn.id in retried.text
    assert gate.fake.engine.generations == 1
    assert len(turn.completion_ids) == gateway.client.rollout(created.id).completion_tokens


def both(gate: Gate, one: Mapping[str, str], two: Mapping[str, str]) -> tuple[int, set[str]]:
    """Two equal requests with these headers, one while the other is answered: generations, ids of the answers."""
    gateway = slowly(gate)
    created, _ = gateway.session()
    url, body = WIRES[0].ask(created.base_url, "Hi", stream=False)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(get, url, body, one)
        assert wait_for(lambda: gate.fake.engine.running)
        second = pool.submit(get, url, body, two)
        ids = {answer.result().json()["id"] for answer in (first, second)}
    assert {f"chatcmpl-{turn.id}" for turn in turns(gateway, created.id)} == ids
    return gate.fake.engine.generations, ids


COUNT = "x-stainless-retry-count"


@pytest.mark.parametrize(
    ("one", "two", "generations"),
    [
        ({}, {}, 1),
        ({"x-session-id": "a"}, {"x-session-id": "a"}, 1),
        ({"x-session-id": "a"}, {"x-session-id": "b"}, 2),
        ({"x-claude-code-agent-id": "a"}, {"x-claude-code-agent-id": "b"}, 2),
        ({"thread-id": "a", "x-codex-turn-metadata": "{}"}, {"thread-id": "a", "x-codex-turn-metadata": "[]"}, 1),
        ({COUNT: "0"}, {COUNT: "0"}, 2),
        ({COUNT: "0"}, {COUNT: "1"}, 1),
        ({COUNT: "0", "x-session-id": "a"}, {COUNT: "0", "x-session-id": "a"}, 1),
    ],
)
def test_equal_requests_at_once_are_one_unless_their_marks_tell_them_apart(
    gate: Gate, one: dict[str, str], two: dict[str, str], generations: int
) -> None:
    made, ids = both(gate, one, two)
    assert (made, len(ids)) == (generations, generations)


def test_children_that_asked_the_same_each_get_their_own_answer_back(gate: Gate) -> None:
    gateway = slowly(gate)
    created, _ = gateway.session()
    url, body = WIRES[0].ask(created.base_url, "Hi", stream=True)
    with ExitStack() as stack:
        asked = {"json": body, "headers": {COUNT: "0"}, "timeout": 60}
        answers = [stack.enter_context(httpx.stream("POST", url, **asked)) for _ in range(2)]
        begun = [next(answer.iter_raw()) for answer in answers]
    assert wait_for(lambda: unheard(gateway) == 2)
    with ThreadPoolExecutor(2) as pool:
        told = list(pool.map(lambda _: get(url, body, {COUNT: "0"}).content, range(2)))
    assert (gate.fake.engine.generations, len(turns(gateway, created.id))) == (2, 2)
    assert sorted(told)[0].startswith(sorted(begun)[0])
    assert sorted(told)[1].startswith(sorted(begun)[1])


@pytest.mark.parametrize("change", [{"max_tokens": 5}, {"seed": 1}, {"model": "other"}, {"messages": [*HI, *HI]}])
def test_another_request_is_another_answer(gate: Gate, change: dict[str, Any]) -> None:
    gateway = slowly(gate)
    created, _ = gateway.session()
    url, body = WIRES[0].ask(created.base_url, "Hi", stream=True)
    leave(url, body, stream=True)
    pace(gate.fake, None)
    get(url, {**body, **change})
    assert gate.fake.engine.generations == 2
    gateway.client.finish_rollout(created.id, wire.FinishRollout(reward=1.0))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_what_clients_change_between_attempts_changes_nothing(gate: Gate, stream: bool) -> None:
    created, _ = gate.gateway.session()

    def codex(turn: str) -> tuple[str, dict[str, Any], dict[str, str]]:
        url, body = WIRES[1].ask(created.base_url, "Hi", stream=stream)
        more = {"client_metadata": {"turn_id": turn}, "metadata": {"a": turn}, "prompt_cache_key": turn}
        return url, {**body, **more}, {"x-codex-turn-metadata": f'{{"turn_id":"{turn}"}}', "traceparent": turn}

    def claude(turn: str) -> tuple[str, dict[str, Any], dict[str, str]]:
        url, body = WIRES[2].ask(created.base_url, "Hi", stream=stream)
        bill = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=1; cch={turn};"}
        marked = [{"type": "text", "text": "Hi", **({"cache_control": {"type": "ephemeral"}} if turn == "2" else {})}]
        more = {"system": [bill], "messages": [{**HI[0], "content": marked}], "metadata": {"user_id": turn}}
        return f"{url}?beta=true", {**body, **more}, {COUNT: turn, "anthropic-beta": turn}

    for attempt in (codex, claude):
        slowly(gate)
        url, body, headers = attempt("1")
        leave(url, body, stream=stream, headers=headers)
        told = get(*attempt("2"))
        assert gate.fake.engine.generations == 1
        pace(gate.fake, None)
        after = get(*attempt("3"))
        assert gate.fake.engine.generations == 2
        one, two = turns(gate.gateway, created.id)[-2:]
        assert one.id in told.text
        assert two.id in after.text


def test_an_end_of_the_rollout_ends_what_nobody_listens_to_at_once(gate: Gate) -> None:
    gateway = slowly(gate)
    created, _ = gateway.session()
    before = metric(gateway, "turngate_cancelled_total")
    leave(*WIRES[0].ask(created.base_url, "Hi", stream=True), stream=True)
    assert wait_for(lambda: unheard(gateway) == 1)
    gateway.client.finish_rollout(created.id, wire.FinishRollout(reward=1.0))
    assert wait_for(lambda: gate.fake.engine.aborted == 1)
    assert (unheard(gateway), metric(gateway, "turngate_cancelled_total")) == (0, before + 1)
    assert turns(gateway, created.id) == []


def test_a_place_among_a_sessions_requests_is_free_when_its_client_left(gate: Gate) -> None:
    gateway = slowly(gate)
    created, _ = gateway.session(budgets={"max_concurrency": 1})
    leave(*WIRES[0].ask(created.base_url, "Hi", stream=True), stream=True)
    assert wait_for(lambda: unheard(gateway) == 1)
    pace(gate.fake, None)
    assert get(*WIRES[0].ask(created.base_url, "Something else", stream=False)).status_code == 200
    gateway.client.finish_rollout(created.id, wire.FinishRollout(reward=1.0))


def test_a_turn_that_nobody_asks_for_again_ends_after_the_limit_and_is_not_kept(
    start_fake: StartFake, start_gateway: StartGateway
) -> None:
    fake = start_fake([WORDS])
    pace(fake, 1.0)
    gateway = start_gateway(fake.url, "--reattach-s", "0.2")
    created, _ = gateway.session()
    leave(*WIRES[0].ask(created.base_url, "Hi", stream=True), stream=True)
    assert wait_for(lambda: fake.engine.aborted == 1)
    assert (unheard(gateway), metric(gateway, "turngate_cancelled_total")) == (0, 1)
    assert turns(gateway, created.id) == []


@pytest.mark.parametrize("workers", ["1", "2"])
def test_draining_waits_for_no_turn_without_a_client(
    start_fake: StartFake, start_gateway: StartGateway, workers: str
) -> None:
    fake = start_fake([WORDS])
    pace(fake, 0.5)
    gateway = start_gateway(fake.url, "--reattach-s", "600", "--drain-s", "600", "--workers", workers)
    created, _ = gateway.session()
    leave(*WIRES[0].ask(created.base_url, "Hi", stream=True), stream=True)
    assert wait_for(lambda: unheard(gateway) == 1)
    assert gateway.process is not None
    gateway.process.send_signal(signal.SIGTERM)
    assert gateway.process.wait(timeout=60) == 0
    assert wait_for(lambda: fake.engine.aborted == 1)


@pytest.mark.parametrize("front", ["true", "false"])
def test_a_retry_finds_its_answer_on_the_worker_of_its_session(
    start_fake: StartFake, start_gateway: StartGateway, front: str
) -> None:
    fake = start_fake([WORDS])
    pace(fake, SLOW_PER_S)
    gateway = start_gateway(fake.url, "--workers", "2", "--front", front)
    for _ in range(2):
        created, _ = gateway.session()
        fake.engine.generations = 0
        url, body = WIRES[0].ask(created.base_url, "Hi", stream=True)
        began = leave(url, body, stream=True)
        assert wait_for(lambda: unheard(gateway) == 1)
        assert get(url, body).content.startswith(began)
        assert (fake.engine.generations, len(turns(gateway, created.id))) == (1, 1)


def test_a_fault_that_no_client_heard_of_leaves_no_mark_on_the_rollout(
    start_fake: StartFake, start_gateway: StartGateway
) -> None:
    fake = start_fake([WORDS])
    pace(fake, SLOW_PER_S)
    gateway = start_gateway(fake.url, "--reattach-s", "60", "--failover-wait-s", "0")
    created, _ = gateway.session(training=False)
    fake.engine.generations = 0
    fake.fail(Fault("error", after_tokens=8))
    url, body = WIRES[0].ask(created.base_url, "Hi", stream=True)
    body = {**body, "presence_penalty": 0.5}  # such an answer cannot be gone on with
    leave(url, body, stream=True)
    assert wait_for(lambda: not fake.engine.running and unheard(gateway) == 0)
    pace(fake, None)
    assert get(url, body).status_code == 200
    assert fake.engine.generations == 2
    gateway.client.finish_rollout(created.id, wire.FinishRollout(reward=1.0))
    finished = gateway.client.rollout(created.id)
    assert (finished.outcome, finished.metrics.get("flags")) == ("scored", None)
