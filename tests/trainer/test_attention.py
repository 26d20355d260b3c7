"""Attention over a packed tree is attention over each path alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from turngate.trainer.attention import (
    FlexTree,
    SdpaTree,
    SizedTree,
    Tree,
    TreeAttention,
    choose,
    example_tree,
    subtree_end,
    tree_mask,
)
from turngate.trainer.errors import AttentionUnavailable
from turngate.trainer.planner import PlannedRow
from turngate.trainer.rows import TrainRow
from turngate.trainer.trl_seam import Packed

PATHS = st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=9), min_size=1, max_size=6)


def packed(paths: Sequence[Sequence[int]]) -> Packed:
    rows = []
    for at, path in enumerate(paths):
        ids = np.asarray(path, np.int32)
        mask = np.arange(len(ids)) > 0
        row = TrainRow("g", f"r{at}", (), ids, mask, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32), 1.0)
        rows.append(PlannedRow(row, mask, 0, 0))
    return Packed.of(rows, torch.device("cpu"))


def tree_of(p: Packed) -> Tree:
    t = p.tensors
    return Tree(t["tree_kv_index"], t["tree_cu_seqlens_q"], t["tree_cu_seqlens_k"], t["position_ids"])


def test_the_example_sees_its_path_and_not_its_sibling() -> None:
    mask = tree_mask(example_tree(torch.device("cpu")))
    assert mask[8].nonzero().flatten().tolist() == [0, 1, 2, 3, 7, 8]
    assert mask[6].nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 5, 6]


@given(PATHS)
@settings(max_examples=60, deadline=None)
def test_each_token_sees_as_many_tokens_as_it_is_deep(paths: list[list[int]]) -> None:
    tree = tree_of(packed(paths))
    mask = tree_mask(tree)
    assert torch.equal(mask.sum(1), tree.depth + 1)
    assert bool((subtree_end(tree) > torch.arange(len(mask))).all())


@given(PATHS, st.sampled_from([None, 3]))
@settings(max_examples=30, deadline=None)
def test_sdpa_on_the_tree_equals_causal_attention_on_each_path(paths: list[list[int]], window: int | None) -> None:
    tree = tree_of(packed(paths))
    mask = tree_mask(tree)
    generator = torch.Generator().manual_seed(len(mask))
    query = torch.randn(1, 4, len(mask), 8, generator=generator, dtype=torch.float64)
    key, value = (torch.randn(1, 2, len(mask), 8, generator=generator, dtype=torch.float64) for _ in range(2))
    sdpa = SdpaTree()
    out, _ = sdpa(torch.nn.Identity(), query, key, value, None, sliding_window=window, **sdpa.prepare(tree))
    for token in range(len(mask)):
        path = mask[token].nonzero().flatten()[-window if window else 0 :]
        alone = functional.scaled_dot_product_attention(
            query[:, :, token : token + 1], key[:, :, path], value[:, :, path], enable_gqa=True
        )
        torch.testing.assert_close(out[:, token], alone[:, :, 0])


def test_on_a_cpu_the_kernel_that_writes_no_scores_out_is_used() -> None:
    tree = tree_of(packed([[1, 2, 3, 7], [1, 2, 8]]))
    query, key, value = (torch.randn((1, heads, len(tree.depth), 16)) for heads in (4, 2, 2))
    sdpa = SdpaTree()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        sdpa(torch.nn.Identity(), query, key, value, None, **sdpa.prepare(tree))
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in {event.key for event in seen.key_averages()}


SHAPES = {
    "one row": [[1, 2, 3, 4, 5]],
    "fork": [[1, 2, 3, 7, 7], [1, 2, 3, 8], [1, 2, 9]],
    "two roots": [[1, 2, 3], [4, 5, 6, 7]],
    "longer than a block": [[1] * 100 + [2] * 60, [1] * 100 + [3] * 33, [1] * 120],
}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("paths", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("window", [None, 3])
def test_flex_equals_sdpa_with_fewer_key_heads(paths: list[list[int]], window: int | None) -> None:
    """Forward only: flex attention has no backward on a CPU; bench/gpu/attention.py compares gradients on a GPU."""
    tree = tree_of(packed(paths))
    n = len(tree.depth)
    generator = torch.Generator().manual_seed(n)
    query, key, value = (torch.randn((1, heads, n, 16), generator=generator) for heads in (14, 2, 2))
    found = [
        attention(torch.nn.Identity(), query, key, value, None, scaling=0.25, sliding_window=window, **prepared)[0]
        for attention in (SdpaTree(), FlexTree(compiled=False))
        for prepared in (attention.prepare(tree),)
    ]
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


class Wrong(SdpaTree):
    name = "wrong"

    def prepare(self, tree: Tree) -> dict[str, torch.Tensor]:
        causal = torch.ones(len(tree.depth), len(tree.depth), dtype=torch.bool).tril()
        return {"tree_mask": causal, "tree_depth": tree.depth}


class Absent(SdpaTree):
    def __init__(self) -> None:
        raise ImportError("no such kernel here")


def test_the_first_that_is_right_is_chosen_and_the_others_say_why_not() -> None:
    chosen, refused = choose([Absent, Wrong, SdpaTree], device=torch.device("cpu"), dtype=torch.float32)
    assert chosen.name == "sdpa"
    assert "no such kernel" in refused["Absent"]
    assert "differs" in refused["wrong"]


def test_nothing_that_works_is_an_error_with_every_reason() -> None:
    with pytest.raises(AttentionUnavailable, match="no such kernel"):
        choose([Absent], device=torch.device("cpu"), dtype=torch.float32)


class TestSized:
    """Small forwards by SDPA, large ones by flex, which is made when the first of them comes."""

    def attend(self, attention: TreeAttention, **kwargs: object) -> torch.Tensor:
        tree = example_tree(torch.device("cpu"))
        generator = torch.Generator().manual_seed(0)
        query = torch.randn(1, 4, 9, 16, generator=generator)
        key, value = (torch.randn(1, 2, 9, 16, generator=generator) for _ in range(2))
        with torch.no_grad():
            return attention(
                torch.nn.Linear(1, 1), query, key, value, None, scaling=0.25, **kwargs, **attention.prepare(tree)
            )[0]

    def test_both_ways_give_the_same(self) -> None:
        made: list[FlexTree] = []

        def flex() -> FlexTree:
            made.append(FlexTree(compiled=False))
            return made[-1]

        small, large = (SizedTree(flex, limit_tokens=limit) for limit in (9, 8))
        exact = self.attend(SdpaTree())
        assert torch.equal(self.attend(small), exact)
        assert made == []
        assert torch.allclose(self.attend(large), exact, atol=1e-5)
        self.attend(large)
        assert len(made) == 1

    def test_a_model_that_caps_its_logits_gets_flex_at_any_size(self) -> None:
        flex = FlexTree(compiled=False)
        capped = self.attend(SizedTree(lambda: flex, limit_tokens=100), softcap=0.1)
        assert torch.allclose(capped, self.attend(flex, softcap=0.1), atol=1e-6)

    def test_where_flex_does_not_work_sdpa_goes_on(self) -> None:
        def broken() -> FlexTree:
            raise RuntimeError("no compiler")

        assert torch.equal(self.attend(SizedTree(broken, limit_tokens=1)), self.attend(SdpaTree()))
