"""The turn tree: prompts and paths copied through bases, token for token."""

from __future__ import annotations

import numpy as np
from hypothesis import given

from tests.proxy.trees import trees
from turngate.proxy.turns import Turn, by_id, counts, path_ids, prompt_ids


@given(trees())
def test_a_prompt_is_the_head_of_its_base_and_a_tail(turns: list[Turn]) -> None:
    known = by_id(turns)
    whole: dict[str, list[int]] = {}
    for turn in turns:
        prompt = [*whole[turn.base][: turn.base_tokens], *turn.tail_ids] if turn.base else [*turn.tail_ids]
        whole[turn.id] = [*prompt, *turn.completion_ids]
        assert prompt_ids(known, turn).tolist() == prompt
        assert path_ids(known, turn).tolist() == whole[turn.id]
        assert (turn.prompt_tokens, turn.path_tokens) == (len(prompt), len(whole[turn.id]))


@given(trees())
def test_ids_are_int32_copies(turns: list[Turn]) -> None:
    known = by_id(turns)
    for turn in turns:
        ids = path_ids(known, turn)
        assert ids.dtype == np.int32
        ids[:] = -1
        assert -1 not in path_ids(known, turn)


@given(trees())
def test_kinds_are_counted(turns: list[Turn]) -> None:
    found = counts(turns)
    firsts = sum(turn.kind == "first" for turn in turns)
    assert found["turns"] == firsts + found["spliced"] + found["breaks"] == len(turns)
