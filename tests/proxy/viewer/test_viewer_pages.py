"""The pages as a browser without scripts gets them: what they show, escape, filter and refuse."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from html import unescape
from pathlib import Path

import httpx
import pytest

from tests.proxy.viewer.sample import HOSTILE, Sample, make_sample, many_rollouts
from turngate.proxy.viewer.app import create_app
from turngate.proxy.viewer.index import build_index
from turngate.proxy.viewer.reader import MemoryReader
from turngate.proxy.wire import RolloutInfo

Keep = Callable[[RolloutInfo, Sample], bool]


@pytest.fixture(scope="module")
def sample() -> Sample:
    return make_sample(120)


@pytest.fixture
def reader(sample: Sample, tmp_path: Path) -> MemoryReader:
    return sample.reader(tmp_path)


@pytest.fixture
async def web(reader: MemoryReader) -> AsyncIterator[httpx.AsyncClient]:
    async with _client(reader) as client:
        yield client


def _client(reader: MemoryReader, host: str = "localhost") -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=create_app(reader))
    return httpx.AsyncClient(transport=transport, base_url=f"http://{host}")


def _rows(html: str) -> list[str]:
    return re.findall(r'<td class="task"><a href="/rollouts/([^"]+)"', html)


def _words(html: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", html)).split())


async def test_the_overview_says_what_the_run_is(web: httpx.AsyncClient, reader: MemoryReader) -> None:
    summary = build_index(reader).summary
    words = _words((await web.get("/")).text)
    assert f"{summary.rollouts} rollouts" in words
    assert f"{summary.solved} of {summary.scored} scored" in words
    for cause, count in summary.breaks.items():
        assert f"{cause} {count}" in words


async def test_every_page_of_every_kind_answers(web: httpx.AsyncClient, sample: Sample) -> None:
    for info in sample.rollouts[::7]:
        for path in (f"/rollouts/{info.id}", f"/rollouts/{info.id}/rows", f"/rollouts/{info.id}/turns/0"):
            assert (await web.get(path)).status_code == 200, path
    for group in {info.group for info in sample.rollouts}:
        assert (await web.get(f"/groups/{str(group).replace('#', '%23')}")).status_code == 200


async def test_what_is_not_there_is_a_404_with_words(web: httpx.AsyncClient, sample: Sample) -> None:
    for path in ("/rollouts/none", f"/rollouts/{sample.rollouts[0].id}/turns/99", "/groups/none", "/nowhere"):
        answer = await web.get(path)
        assert answer.status_code == 404
        assert "Nothing here" in answer.text


async def test_text_of_models_and_agents_is_never_markup(web: httpx.AsyncClient, sample: Sample) -> None:
    seen = 0
    for info in sample.rollouts:
        if HOSTILE not in str([(t.request, t.response) for t in sample.turns[info.id]]):
            continue
        for path in (f"/rollouts/{info.id}", f"/rollouts/{info.id}/turns/{info.turns - 1}"):
            html = (await web.get(path)).text
            assert "<img" not in html
            assert re.findall(r"<script[^>]*>", html) == ['<script src="/static/viewer.js" defer>']
            seen += HOSTILE in unescape(html)
    assert seen > 3


async def test_pages_carry_a_policy_that_forbids_inline_scripts_and_styles(web: httpx.AsyncClient) -> None:
    answer = await web.get("/")
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert "unsafe-inline" not in answer.headers["content-security-policy"]
    assert not re.search(r'\s(style|on\w+)="', answer.text)


async def test_pages_name_no_other_host(web: httpx.AsyncClient, sample: Sample) -> None:
    info = sample.rollouts[3]
    paths = ("/", f"/rollouts/{info.id}", f"/rollouts/{info.id}/turns/1", "/static/viewer.css", "/static/viewer.js")
    for path in paths:
        text = (await web.get(path)).text.replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://", text), path


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "127.0.0.1@evil.example"]
)
async def test_other_host_names_are_refused(reader: MemoryReader, host: str) -> None:
    async with _client(reader, host) as web:
        answer = await web.get("/")
    assert answer.status_code == 421
    assert "--allow-host" in answer.text


@pytest.mark.parametrize("host", ["localhost:8700", "127.0.0.1:9", "[::1]:8700", "LOCALHOST", "10.1.2.3", "localhost."])
async def test_local_host_names_are_answered(reader: MemoryReader, host: str) -> None:
    async with _client(reader) as web:
        assert (await web.get("/", headers={"host": host})).status_code == 200


@pytest.mark.parametrize(
    ("query", "keep"),
    [
        ("task=python/fix-csv", lambda i, s: i.task == "python/fix-csv"),
        ("harness=opencode", lambda i, s: i.harness == "opencode"),
        ("outcome=unscorable", lambda i, s: i.outcome == "unscorable"),
        ("outcome=open", lambda i, s: i.state == "open"),
        ("reward_min=0.25&reward_max=0.5", lambda i, s: i.reward is not None and 0.25 <= i.reward <= 0.5),
        ("version=2", lambda i, s: i.version == 2),
        ("breaks=yes", lambda i, s: i.breaks > 0),
        ("breaks=no", lambda i, s: i.breaks == 0),
        ("label=subagent", lambda i, s: any(t.label == "subagent" for t in s.turns[i.id])),
        ("cause=compaction", lambda i, s: any(t.break_cause == "compaction" for t in s.turns[i.id])),
        ("text=verifier", lambda i, s: "verifier" in str(i.cause)),
        ("task=python/fix-csv&harness=pi&version=1", lambda i, s: (i.task, i.harness, i.version) == _WANTED),
        ("reward_min=much&version=x&page=-1&sort=nothing", lambda i, s: True),
    ],
)
async def test_filters_show_exactly_what_passes(web: httpx.AsyncClient, sample: Sample, query: str, keep: Keep) -> None:
    expected = {info.id for info in sample.rollouts if keep(info, sample)}
    shown = [row async for page in _pages(web, f"/?{query}") for row in _rows(page)]
    assert len(shown) == len(set(shown))
    assert set(shown) == expected


_WANTED = ("python/fix-csv", "pi", 1)


async def _pages(web: httpx.AsyncClient, path: str) -> AsyncIterator[str]:
    while True:
        html = (await web.get(path)).text
        yield html
        following = re.search(r'<a href="([^"]+)" rel="next"', html)
        if following is None:
            return
        path = unescape(following.group(1))


@pytest.mark.parametrize("sort", ["created", "task", "reward", "version", "turns", "breaks", "tokens", "duration"])
async def test_both_orders_of_a_column_hold_the_same_rollouts(web: httpx.AsyncClient, sort: str) -> None:
    up = [row async for page in _pages(web, f"/?sort={sort}") for row in _rows(page)]
    down = [row async for page in _pages(web, f"/?sort=-{sort}") for row in _rows(page)]
    assert len(up) == 120
    assert set(up) == set(down)
    assert up != down


async def test_ten_thousand_rollouts_come_a_page_at_a_time(sample: Sample) -> None:
    async with _client(many_rollouts(sample, 10_000)) as web:
        first = (await web.get("/")).text
        last = (await web.get("/?page=999999")).text
    assert len(_rows(first)) == 50
    assert "1–50 of 10,000" in _words(first)
    assert "9,951–10,000 of 10,000" in _words(last)
    assert len(first) < 200_000


async def test_a_turn_page_shows_the_recorded_ids_and_log_probs(web: httpx.AsyncClient, sample: Sample) -> None:
    info = next(info for info in sample.rollouts if info.turns > 3)
    turn = sample.turns[info.id][2]
    html = (await web.get(f"/rollouts/{info.id}/turns/2")).text
    completion = html[html.index("data-tokens") :]
    chips = re.findall(r'data-n="(\d+)" data-id="(\d+)" data-lp="([^"]+)"', completion)
    assert [int(chip[0]) for chip in chips] == list(range(turn.prompt_tokens, turn.path_tokens))
    assert [int(chip[1]) for chip in chips] == turn.completion_ids.tolist()
    assert [float(chip[2]) for chip in chips] == turn.logprobs.tolist()


async def test_sampling_that_the_session_overrode_is_marked(web: httpx.AsyncClient, sample: Sample) -> None:
    html = (await web.get(f"/rollouts/{sample.rollouts[0].id}/turns/0")).text
    lines = re.findall(r"<tr class=\"overridden\".*?</tr>", html, re.DOTALL)
    assert any("temperature 0.2 1.0" in _words(line) for line in lines)


async def test_a_store_without_a_tokenizer_shows_ids(sample: Sample) -> None:
    bare = MemoryReader("bare", sample.rollouts, sample.turns, sample.adapters)
    info = sample.rollouts[0]
    async with _client(bare) as web:
        html = (await web.get(f"/rollouts/{info.id}/turns/0")).text
    assert "no tokenizer.json" in html
    assert f">{sample.turns[info.id][0].completion_ids[0]}</span>" in html


async def test_an_empty_run_is_not_an_error() -> None:
    async with _client(MemoryReader("empty", [], {})) as web:
        assert "No rollouts yet" in (await web.get("/")).text


async def test_a_store_that_cannot_be_read_says_why(sample: Sample, tmp_path: Path) -> None:
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{}")
    info = sample.rollouts[0]
    async with _client(MemoryReader("broken", sample.rollouts, sample.turns, (), broken)) as web:
        answer = await web.get(f"/rollouts/{info.id}/turns/0")
    assert answer.status_code == 500
    assert "is not a tokenizer.json" in answer.text


async def test_the_state_changes_only_when_something_was_written(reader: MemoryReader) -> None:
    async with _client(reader) as web:
        before = (await web.get("/state")).text
        assert f'data-live="{before}"' in (await web.get("/")).text
        assert (await web.get("/state")).text == before
        reader.version[0] += 1
        assert (await web.get("/state")).text != before
