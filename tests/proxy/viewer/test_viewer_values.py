"""The pure parts: token text, messages as blocks, numbers as words, filters in addresses, advantages, charts."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.proxy.viewer.sample import SPECIALS, make_sample, sample_tokenizer
from turngate.proxy.rows import build_rows
from turngate.proxy.viewer import format as words
from turngate.proxy.viewer import pages, tokens
from turngate.proxy.viewer.app import create_app
from turngate.proxy.viewer.charts import surprise_bars
from turngate.proxy.viewer.index import SORTS, Filters, advantages
from turngate.proxy.viewer.messages import view_message
from turngate.proxy.viewer.query import ListQuery
from turngate.proxy.viewer.reader import MemoryReader
from turngate.proxy.viewer.serve import parser
from turngate.proxy.viewer.text import TokenText


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TokenText:
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    sample_tokenizer().save(str(file))
    return TokenText(file)


@given(said=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_pieces_of_whole_characters_join_to_the_text(text: TokenText, said: str) -> None:
    ids = sample_tokenizer().encode(said).ids
    pieces = text.pieces(ids)
    assert [piece.id for piece in pieces] == ids
    assert "".join(piece.text for piece in pieces if not piece.partial) == said


@given(ids=st.lists(st.integers(0, 2000), max_size=40))
def test_any_ids_have_pieces(text: TokenText, ids: list[int]) -> None:
    assert [piece.id for piece in text.pieces(ids)] == ids


def test_a_character_split_over_tokens_shows_its_bytes_first(text: TokenText) -> None:
    ids = sample_tokenizer().encode("🪐").ids
    pieces = text.pieces(ids)
    assert len(pieces) > 1
    assert [piece.partial for piece in pieces] == [True] * (len(ids) - 1) + [False]
    assert pieces[0].text.startswith("F0")
    assert pieces[-1].text == "🪐"


def test_special_tokens_are_marked_and_text_that_looks_like_them_is_not(text: TokenText) -> None:
    specials = text.pieces([0, 1, 2])
    assert [piece.text for piece in specials] == SPECIALS
    assert all(piece.special for piece in specials)
    spelled = sample_tokenizer().encode("<|im").ids
    assert not any(piece.special for piece in text.pieces(spelled))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)
MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "role": JSON,
        "content": JSON,
        "reasoning": JSON,
        "tool_calls": st.lists(JSON | st.fixed_dictionaries({"id": JSON, "function": JSON}), max_size=3),
        "tool_call_id": JSON,
    },
)


@given(message=JSON | MESSAGE)
def test_no_message_is_too_odd_to_show(message: Any) -> None:
    shown = view_message(message)
    assert isinstance(shown.role, str)
    assert all(isinstance(block.text, str) and block.lines > 0 for block in shown.blocks)


@given(content=st.text(min_size=1, max_size=200))
def test_no_text_of_a_message_is_lost(content: str) -> None:
    shown = "".join(block.title + block.text for block in view_message({"role": "user", "content": content}).blocks)
    assert sorted(shown.replace("`", "").split()) == sorted(content.replace("`", "").split()) or "```" in content


def test_fenced_code_is_a_block_of_its_own() -> None:
    shown = view_message({"role": "assistant", "content": "Look:\n\n```python\nx = 1\n```\nDone."})
    assert [(b.kind, b.title, b.text) for b in shown.blocks] == [
        ("text", "", "Look:"),
        ("code", "python", "x = 1"),
        ("text", "", "Done."),
    ]


def test_arguments_are_shown_parsed_and_kept_as_sampled() -> None:
    raw = '{"command" :  "ls\\n-la", "n": 1.50}'
    call = {"id": "a1", "function": {"name": "bash", "arguments": raw}}
    (block,) = view_message({"role": "assistant", "content": None, "tool_calls": [call]}).blocks
    assert block.text == raw
    assert [(a.name, a.value, a.block) for a in block.arguments] == [("command", "ls\n-la", True), ("n", "1.5", False)]


def test_broken_arguments_are_shown_as_they_are() -> None:
    call = {"id": "a1", "function": {"name": "bash", "arguments": '{"command": "ls'}}
    (block,) = view_message({"role": "assistant", "tool_calls": [call]}).blocks
    assert (block.text, block.arguments) == ('{"command": "ls', ())


@given(
    filters=st.builds(
        Filters,
        task=st.text(st.characters(min_codepoint=33, exclude_categories=["Cs", "Zs", "Zl", "Zp", "Cc"]), max_size=9),
        reward_min=st.none() | st.sampled_from([0.0, 0.25, -1.5]),
        version=st.none() | st.integers(0, 99),
        breaks=st.sampled_from(["", "yes", "no"]),
    ),
    sort=st.sampled_from(["created", "reward", "tokens"]),
    descending=st.booleans(),
    page=st.integers(1, 999),
)
def test_an_address_says_the_query_that_it_was_made_from(
    filters: Filters, sort: str, descending: bool, page: int
) -> None:
    query = ListQuery(filters, sort, descending, page)
    given_back = dict(parse_qsl(urlsplit(query.href(page=page)).query))
    assert ListQuery.parse(given_back) == query


def test_advantages_are_of_scored_rollouts_only_and_sum_to_nothing() -> None:
    sample = make_sample(60)
    for start in range(0, 48, 6):
        group = sample.rollouts[start : start + 6]
        found = advantages(group)
        scored = [value for value in found.values() if value is not None]
        assert [found[i.id] is None for i in group] == [i.outcome != "scored" for i in group]
        assert sum(scored) == pytest.approx(0, abs=1e-9)


def test_rows_show_every_trained_token_and_hide_only_context(text: TokenText) -> None:
    sample = make_sample(12)
    for turns in sample.turns.values():
        for row in build_rows(turns):
            stretches = tokens.row_stretches(text, row)
            shown = [chip.place for stretch in stretches if stretch.trained for chip in stretch.chips]
            assert shown == row.mask.nonzero()[0].tolist()
            assert sum(len(s.chips) + s.hidden for s in stretches) == len(row.ids)


def test_bars_of_all_turns_lie_on_one_axis() -> None:
    for turns in make_sample(12).turns.values():
        for card in pages.cards(turns):
            assert [phase.name for phase in card.phases] == ["queue", "prefill", "decode"]
            assert sum(phase.ms for phase in card.phases) == pytest.approx(card.total_ms)
            assert all(phase.x >= 0 and phase.x + phase.width <= 101 for phase in card.phases)


@given(logprobs=st.lists(st.floats(-30, 0), min_size=1, max_size=3000))
def test_the_bars_of_a_long_answer_stay_few_and_inside(logprobs: list[float]) -> None:
    bars = surprise_bars(logprobs, [tokens.surprise_bucket(value) for value in logprobs])
    assert len(bars) <= 400
    assert all(0 <= bar.y <= 40 and bar.x + bar.width <= 801 for bar in bars)


@pytest.mark.parametrize(
    ("logprob", "bucket"), [(0.0, 0), (-0.1, 0), (-0.2, 1), (-5.0, 5), (-6.0, 6), (float("-inf"), 6)]
)
def test_colour_buckets(logprob: float, bucket: int) -> None:
    assert tokens.surprise_bucket(logprob) == bucket


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (words.short(9999), "9,999"),
        (words.short(130_200), "130k"),
        (words.short(1_234_567), "1.23M"),
        (words.short(999_999), "1M"),
        (words.percent(0.5), "50 %"),
        (words.reward(0.0), "0"),
        (words.reward(-0.25), "-0.25"),
        (words.reward(1.0), "1"),
        (words.reward(10.0), "10"),
        (words.milliseconds(8.4), "8 ms"),
        (words.milliseconds(200_000), "3 m 20 s"),
        (words.milliseconds(None), "–"),
        (words.group_tail("shell/x#12", "shell/x"), "#12"),
        (words.group_tail("bread:01a22887-cea3-7b39-84ad-a146b7839192", "bread"), "…b7839192"),
    ],
)
def test_numbers_as_words(made: str, said: str) -> None:
    assert made == said


def test_the_data_of_a_chip_is_json_with_one_sampled_alternative(text: TokenText) -> None:
    turn = next(iter(make_sample(6).turns.values()))[0]
    for chip in tokens.completion_chips(text, turn):
        rows = json.loads(chip.data)
        assert [row[0] for row in rows if row[3]] == [chip.piece.id]


def test_the_static_files_are_there() -> None:
    folder = Path(pages.__file__).parent / "static"
    assert {file.name for file in folder.iterdir()} == {"viewer.css", "viewer.js", "icon.svg"}


def test_both_names_of_the_token_limit_are_compared() -> None:
    turn = next(iter(make_sample(6).turns.values()))[0]
    asked = replace(turn, sampling_asked={"max_completion_tokens": 9}, sampling_used={"max_tokens": 4, "n": 1})
    limit, count = pages.sampling(asked)
    assert (limit.name, limit.asked, limit.used, limit.overridden, limit.common) == ("max_tokens", 9, 4, True, True)
    assert (count.name, count.overridden, count.common) == ("n", False, False)


_PLACES = {"group": "GROUP", "rollout": "ID", "seq": "SEQ"}


def test_the_page_about_the_viewer_names_every_page_filter_and_order() -> None:
    about = (Path(__file__).parents[3] / "docs" / "viewer.md").read_text()
    named = [field.name for field in fields(Filters)] + list(SORTS)
    assert [name for name in named if f"`{name}`" not in about] == []
    options = [option for action in parser()._actions for option in action.option_strings if option.startswith("--")]
    unsaid = [option for option in options if option not in about]
    assert unsaid == ["--help"]
    for route in create_app(MemoryReader("none", [], {})).routes:
        shape = re.sub(
            r"\{(\w+)[^}]*\}", lambda name: {"group": "GROUP", "rollout": "ID", "seq": "SEQ"}[name[1]], route.path
        )
        assert f"`{shape}`" in about, shape
