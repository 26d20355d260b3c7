"""Answers in the making: who is told which one, and what is left of them, whatever clients do."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngate.proxy.ask import Answer, Ask, Usage
from turngate.proxy.errors import BadRequest, EngineTrouble
from turngate.proxy.reattach import MAX_UNHEARD, Marks, Table, Telling, Tellings, retry_key

ANSWER = Answer({"role": "assistant", "content": "abc"}, "stop", Usage(1, 3))
NOBODY = Marks(b"", first=False)
COUNTED = Marks(b"", first=True)
NAMED = Marks(b"x-session-id:a\n", first=True)
HEADERS = [
    (b"x-session-id", b"a"),
    (b"x-session-id", b"b"),
    (b"x-claude-code-agent-id", b"a"),
    (b"thread-id", b"a"),
    (b"idempotency-key", b"a"),
]
UNNAMED = [(b"x-request-id", b"1"), (b"traceparent", b"2"), (b"x-codex-turn-metadata", b"{}"), (b"date", b"3")]


def tellings(linger_s: float = 60.0) -> Tellings:
    return Tellings(linger_s, lambda: None, lambda: None)


def ask(**changes: Any) -> Ask:
    plain: dict[str, Any] = {"model": "m", "messages": [], "tools": None, "render_body": {}, "asked": {}}
    return Ask(**{**plain, "stream": False, "include_usage": False, **changes})


@given(st.lists(st.sampled_from(HEADERS)), st.lists(st.sampled_from(HEADERS)), st.lists(st.sampled_from(UNNAMED)))
def test_a_request_is_the_same_when_its_conversation_is_whatever_else_its_headers_say(
    one: list[tuple[bytes, bytes]], two: list[tuple[bytes, bytes]], rest: list[tuple[bytes, bytes]]
) -> None:
    keys = [retry_key(b"h", "chat", ask(), Marks.of(headers)) for headers in (one, [*rest, *two])]
    assert (keys[0] == keys[1]) == (one == two)


WISHES = {"temperature": 0.5, "seed": 1, "max_tokens": 5, "stop": ["a", "b"], "tool_choice": {"type": "none"}}
wishes = st.dictionaries(st.sampled_from(list(WISHES)), st.none()).map(lambda d: {key: WISHES[key] for key in d})


@given(wishes, wishes, st.randoms(use_true_random=False))
def test_a_request_is_the_same_with_the_same_wishes_in_any_order(one: dict, two: dict, random: Any) -> None:  # type: ignore[type-arg]
    shuffled = list(two.items())
    random.shuffle(shuffled)
    for name in ("asked", "render_body"):
        keys = {retry_key(b"h", "chat", ask(**{name: wish}), NOBODY) for wish in (one, dict(shuffled))}
        assert (len(keys) == 1) == (one == two)


def test_dialect_model_and_history_make_another_request_streaming_and_metadata_do_not() -> None:
    plain = retry_key(b"h", "chat", ask(), NOBODY)
    others = [
        retry_key(b"h", "messages", ask(), NOBODY),
        retry_key(b"h", "chat", ask(model="n"), NOBODY),
        retry_key(b"g", "chat", ask(), NOBODY),
        retry_key(b"h", "chat", ask(), NAMED),
    ]
    assert len({plain, *others}) == 5
    same = ask(stream=True, include_usage=True, params={"metadata": {"a": 1}}, notes=("x",), about={"y": 1})
    assert retry_key(b"h", "chat", same, COUNTED) == plain


ATTEMPTS = st.lists(st.sampled_from(["ask", "ask as named", "ask as counted", "leave", "deliver", "fail"]), max_size=30)


@given(ATTEMPTS, st.randoms(use_true_random=False))
def test_whatever_clients_do_each_answer_is_told_until_one_has_it_whole(steps: list[str], random: Any) -> None:
    async def run() -> None:
        home, table, key = tellings(), Table(), b"k"
        listening: list[Telling] = []
        over: set[Telling] = set()
        for step in steps:
            if step.startswith("ask"):
                marks = {"ask": NOBODY, "ask as named": NAMED, "ask as counted": COUNTED}[step]
                known = list(table.get(key, ()))
                alone = [one for one in known if not one.listeners]
                wanted = alone[:1] or ([] if marks == COUNTED else known[-1:])
                found = home.find(table, key, marks)
                assert [found] == (wanted or [None])
                listening.append(found or home.begin(table, key, "t", 0))
            elif listening:
                telling = listening.pop(random.randrange(len(listening)))
                if step == "fail":
                    telling.failed(BadRequest("no"))
                    over.add(telling)
                if step == "deliver":
                    over.add(telling)
                home.left(telling, delivered=step == "deliver")
            assert all(one.listeners == listening.count(one) for one in {*listening, *home.unheard})
            assert all(not one.listeners for one in home.unheard)
            assert not over & {one for same in table.values() for one in same}
        home.drain()
        assert not home.unheard
        assert {one for same in table.values() for one in same} <= set(listening)

    asyncio.run(run())


async def told(telling: Telling) -> list[Any]:
    return [delta async for delta in telling.listen()]


async def test_a_listener_gets_every_piece_from_the_first_on_and_waits_for_the_last() -> None:
    telling = tellings().begin({}, b"k", "t", 0)
    telling.opened(3)
    telling.add({"content": "a"})
    late = [asyncio.create_task(told(telling)) for _ in range(2)]
    await asyncio.sleep(0)
    telling.add({"content": "b"})
    await asyncio.sleep(0)
    assert not any(task.done() for task in late)
    telling.finished(ANSWER)
    assert [await task for task in late] == [[{"content": "a"}, {"content": "b"}]] * 2
    assert await told(telling) == [{"content": "a"}, {"content": "b"}]


async def test_a_refusal_reaches_everyone_also_before_the_prompt_stands() -> None:
    telling = tellings().begin({}, b"k", "t", 0)
    waiting = [asyncio.create_task(telling.until_open()), asyncio.create_task(told(telling))]
    await asyncio.sleep(0)
    telling.failed(BadRequest("no"))
    assert [type(error) for error in await asyncio.gather(*waiting, return_exceptions=True)] == [BadRequest] * 2
    assert telling.table == {}


async def test_an_answer_whose_maker_is_gone_is_a_fault_for_its_listeners() -> None:
    telling = tellings().begin({}, b"k", "t", 0)
    telling.opened(None)
    waiting = asyncio.create_task(told(telling))
    await asyncio.sleep(0)
    telling.ended()
    with pytest.raises(EngineTrouble):
        await waiting


async def test_only_so_many_wait_and_the_one_left_longest_ago_goes_first() -> None:
    home, table = tellings(), Table()
    ended: list[str] = []

    async def work(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name)

    for number in range(MAX_UNHEARD + 2):
        telling = home.begin(table, b"%d" % number, str(number), 0)
        telling.work = asyncio.create_task(work(str(number)))
        await asyncio.sleep(0)
        home.left(telling, delivered=False)
    await asyncio.sleep(0)
    assert ended == ["0", "1"]
    assert len(home.unheard) == len(table) == MAX_UNHEARD
    await home.close()
    assert len(ended) == MAX_UNHEARD + 2
    assert (home.unheard, table) == ({}, {})


async def test_one_that_nobody_asks_for_ends_after_its_time_and_one_that_is_asked_for_does_not() -> None:
    home, table = tellings(0.01), Table()
    one, two = home.begin(table, b"1", "1", 0), home.begin(table, b"2", "2", 0)
    one.work, two.work = asyncio.create_task(asyncio.sleep(60)), asyncio.create_task(asyncio.sleep(60))
    home.left(one, delivered=False)
    home.left(two, delivered=False)
    assert home.find(table, b"2", NOBODY) is two
    with suppress(asyncio.CancelledError):
        await asyncio.wait_for(one.work, 60)
    assert (one.work.cancelled(), two.work.done(), list(table)) == (True, False, [b"2"])
    two.work.cancel()


async def test_nothing_outlives_its_client_where_that_is_turned_off_or_the_gateway_drains() -> None:
    off, draining = tellings(0.0), tellings()
    draining.drain()
    for home in (off, draining):
        telling = home.begin({}, b"k", "t", 0)
        telling.work = asyncio.create_task(asyncio.sleep(60))
        home.left(telling, delivered=False)
        await home.close()
        assert telling.work.cancelled()
        assert (home.unheard, telling.table) == ({}, {})
