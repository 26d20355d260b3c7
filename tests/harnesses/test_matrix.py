"""The harness matrix: a few of its real runs, and that it would notice what is not as written down before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.matrix.expectations import Expected, load_expected
from bench.matrix.play import play
from bench.matrix.prompts import Conversation, Prompt, Talk
from bench.matrix.scenarios import SCENARIOS
from bench.matrix.scoring import by_label
from bench.matrix.verdict import Heard, Seen, judge
from bench.matrix.vocabulary import WORDS
from bench.matrix.witness import rows
from tests.conftest import FindModel
from tests.tap import Generation

PROMPT = (
    "<|im_start|>system\nBe brief. <tools></tools><|im_end|>\n<|im_start|>user\nDo it.<|im_end|>\n"
    "<|im_start|>assistant\nHm.<|im_end|>\n<|im_start|>user\nAgain.<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.mark.harness
@pytest.mark.parametrize(
    ("name", "title"), [("pi", "broken-json"), ("mini-swe-agent", "unknown-tool"), ("gemini-cli", "side")]
)
async def test_what_comes_of_a_scenario_was_written_down_before(
    model_dir: FindModel, tmp_path: Path, name: str, title: str
) -> None:
    expected, scenario = load_expected()[title][name], SCENARIOS[title](name, WORDS[name])
    run = await play(name, title, scenario, expected, model_dir("qwen-coder-0.5b"), tmp_path)
    assert run.wrong == ()
    assert run.line["exact_rows"] == expected.rows
    assert [one.label for one in run.heard] == [one.truth for one in run.heard]


def test_every_scenario_is_written_for_agents_whose_words_are_known() -> None:
    expected = load_expected()
    assert set(expected) == set(SCENARIOS)
    for title, of_agent in expected.items():
        for name in of_agent:
            talk = SCENARIOS[title](name, WORDS[name]).talk
            assert {one.label for one in talk} == set(of_agent[name].labels), f"{title} {name}"


def test_a_prompt_is_told_by_what_stands_before_its_first_and_after_its_last_answer() -> None:
    prompt = Prompt(PROMPT)
    assert (prompt.answers, prompt.tools) == (1, True)
    assert "Do it." in prompt.head
    assert "Again." not in prompt.head
    assert prompt.tail == "Again."
    talk = Talk.of_conversations(
        [Conversation("side", ["a"], tail="Do it."), Conversation("main", ["b", "c"], head="Do it.")]
    )
    assert talk.conversation(PROMPT).label == "main"
    assert talk.answer(PROMPT) == "c"
    with pytest.raises(LookupError, match="no conversation"):
        Talk.of_conversations([Conversation("main", ["a"], tools=False)]).answer(PROMPT)


def _seen(**changed: Any) -> Seen:
    as_expected: dict[str, Any] = {
        "status": "scored",
        "causes": {"turn_dropped": 1},
        "heard": (Heard("main", "r", "main"), Heard("main", "r", "main")),
        "rows": 2,
        "exact_rows": 2,
        "duplicates": 0,
        "problems": (),
        "unmatched": 0,
        "detail": "",
    }
    return Seen(**{**as_expected, **changed})


EXPECTED = Expected(labels={"main": 2}, rows=2, breaks={"turn_dropped": 1})


def test_a_run_is_as_expected_only_if_nothing_is_missing_or_more() -> None:
    assert judge("pi", "x", EXPECTED, _seen()).line["ok"]
    for changed in (
        {"causes": {}},
        {"causes": {"turn_dropped": 1, "content_edited": 1}},
        {"heard": (Heard("main", "r", "main"), Heard("main", "r", "side"))},
        {"heard": (Heard("main", "r", "main"),)},
        {"exact_rows": 1},
        {"duplicates": 1},
        {"problems": ("a turn is not what was sampled",)},
        {"unmatched": 1},
        {"status": "unscorable: harness_error"},
    ):
        run = judge("pi", "x", EXPECTED, _seen(**changed))
        assert not run.line["ok"], changed
        assert run.wrong


def test_a_line_has_the_keys_that_readers_count_on() -> None:
    keys = "harness scenario ok status turns breaks break_causes expected_breaks labels rows exact_rows duplicate_turns"
    assert list(judge("pi", "x", EXPECTED, _seen()).line) == keys.split()


def test_precision_is_of_what_was_called_so_and_recall_of_what_was_so() -> None:
    heard = [Heard("main", "r", "main"), Heard("main", "r", "side"), Heard("side", "r", "side")]
    found = by_label(heard)
    assert found["main"] == {"turns": 1, "precision": 0.5, "recall": 1.0}
    assert found["side"] == {"turns": 2, "precision": 1.0, "recall": 0.5}
    assert found["subagent"] == {"turns": 0, "precision": None, "recall": None}


def test_the_witness_trains_each_token_once_and_only_where_it_is_to_be_trained() -> None:
    first = Generation((1, 2), (3,), (-0.1,), "stop")
    second = Generation((1, 2, 3, 4), (5,), (-0.2,), "stop")
    other = Generation((9,), (8,), (-0.3,), "stop")
    made = rows([first, second, other], lambda one: one is not other)
    assert made == [((1, 2, 3, 4, 5), (None, None, -0.1, None, -0.2))]
