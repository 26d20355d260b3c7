"""Attention over a packed prefix tree: every token sees its own root-to-token path and nothing else.

Three ways with one meaning: a FlashAttention kernel handed in by the seam, torch flex attention (compiled, GPU) and
SDPA with a mask (anywhere). The first that works is chosen once; without a kernel the size of a forward decides.
Nothing here knows TRL; it must never be chosen silently wrong, so each is tried on a small tree against the definition.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from turngate.trainer.errors import AttentionUnavailable

log = logging.getLogger(__name__)

FLEX_BLOCK = 128
SDPA_KERNELS = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
"""Of torch's kernels those that a mask is safe with. On Hopper torch 2.11 and later prefer cuDNN's, whose backward
gives NaN where the length is 64 above a multiple of 128 and all scores of a row are very low, as in one head of
Qwen2.5 (pytorch/pytorch issue 196678). Flash attention takes a mask on a CPU only, where nothing else is as fast.
"""
SDPA_TOKENS = 8192
"""Largest forward for SDPA: on an H200 it took 1.5 to 4.6 ms for 2,000 to 7,400 tokens where flex took 10 to 12, by the
kernel that torch chose itself (`bench/gpu/attention.py`), but its mask, read by every layer, grows with the square: 64
MiB here, 256 MiB at 16k.
"""


@dataclass(frozen=True, slots=True)
class Tree:
    """A packed prefix tree in depth-first order, of N tokens in S segments.

    `kv_index: int64[K]` lays the root-to-segment paths of all segments end to end; `cu_q: int32[S+1]` are segment
    boundaries in the packed row, `cu_k: int32[S+1]` path boundaries in `kv_index`; `depth: int64[N]` is each token's
    position on its path.
    """

    kv_index: Tensor
    cu_q: Tensor
    cu_k: Tensor
    depth: Tensor


class TreeAttention(Protocol):
    """One way to attend. `prepare` runs once a forward, its result reaches `__call__` as keyword arguments."""

    name: str

    def prepare(self, tree: Tree) -> dict[str, Any]:
        """What every layer of one forward shares."""

    def __call__(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Attend: `query[1, H, N, D]`, `key`/`value[1, Hkv, N, D]` to `[1, N, H, D]`."""


def subtree_end(tree: Tree) -> Tensor:
    """For each token the end (exclusive) of its subtree in depth-first order: `int64[N]`.

    A token k is seen by a token q exactly when `k <= q < subtree_end[k]`.
    """
    lengths = (tree.cu_k[1:] - tree.cu_k[:-1]).long()
    ends = tree.cu_q[1:].long().repeat_interleave(lengths)
    out = torch.zeros(int(tree.cu_q[-1]), dtype=torch.long, device=tree.kv_index.device)
    return out.scatter_reduce(0, tree.kv_index, ends, "amax", include_self=True)


def tree_mask(tree: Tree) -> Tensor:
    """Which token sees which: `bool[N, N]`, rows are queries."""
    ends = subtree_end(tree)
    at = torch.arange(len(ends), device=ends.device)
    return (at[None, :] <= at[:, None]) & (at[:, None] < ends[None, :])


class SdpaTree:
    """torch's scaled dot product attention with the mask written out: O(N^2) memory, exact, runs anywhere."""

    name = "sdpa"

    def prepare(self, tree: Tree) -> dict[str, Any]:
        """The mask and the depths."""
        return {"tree_mask": tree_mask(tree), "tree_depth": tree.depth}

    def __call__(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """See `TreeAttention`; `softcap` is refused because SDPA cannot apply it."""
        if kwargs.get("softcap"):
            raise AttentionUnavailable(f"{type(module).__name__} caps its attention logits, which SDPA cannot do")
        mask = kwargs["tree_mask"]
        if window := kwargs.get("sliding_window"):
            depth = kwargs["tree_depth"]
            mask = mask & (depth[:, None] - depth[None, :] < window)
        shared = query.shape[1] // key.shape[1]
        if shared > 1:  # written out: with `enable_gqa` torch has no kernel left but the one that writes out all scores
            key, value = (x.repeat_interleave(shared, dim=1) for x in (key, value))
        with sdpa_kernel(list(SDPA_KERNELS)):
            out = functional.scaled_dot_product_attention(
                query,
                key.to(query.dtype),
                value.to(query.dtype),
                attn_mask=mask[None, None],
                scale=kwargs.get("scaling"),
            )
        return out.transpose(1, 2), None


class FlexTree:
    """torch flex attention, compiled: block-sparse over the tree, no kernel from outside. Chosen on GPUs only.

    Uncompiled it writes the scores out, which is for tests on a CPU (forward only: it has no backward there). N is
    padded to a multiple of 128 so that few shapes are compiled.
    """

    name = "flex"

    def __init__(self, *, compiled: bool = True) -> None:
        from torch.nn.attention import flex_attention

        flex = flex_attention.flex_attention
        self._flex = torch.compile(flex, dynamic=True) if compiled else flex
        self._block_mask = flex_attention.create_block_mask

    def prepare(self, tree: Tree) -> dict[str, Any]:
        """Block masks; one a window size is made on first use."""
        ends = subtree_end(tree)
        padding = -len(ends) % FLEX_BLOCK
        ends = functional.pad(ends, (0, padding))
        depth = functional.pad(tree.depth, (0, padding))
        return {"tree_ends": ends, "tree_depth": depth, "tree_blocks": {}}

    def __call__(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """See `TreeAttention`."""
        ends, depth = kwargs["tree_ends"], kwargs["tree_depth"]
        window = kwargs.get("sliding_window") or 0
        blocks = kwargs["tree_blocks"]
        if window not in blocks:
            blocks[window] = self._blocks(ends, depth, window)
        softcap = kwargs.get("softcap")

        def capped(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return softcap * torch.tanh(score / softcap)

        padding = len(ends) - query.shape[2]
        q, k, v = (functional.pad(x.to(query.dtype), (0, 0, 0, padding)) for x in (query, key, value))
        out = self._flex(
            q,
            k,
            v,
            score_mod=capped if softcap else None,
            block_mask=blocks[window],
            scale=kwargs.get("scaling"),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out[:, :, : query.shape[2]].transpose(1, 2), None

    def _blocks(self, ends: Tensor, depth: Tensor, window: int) -> Any:
        def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            seen = ((k <= q) & (q < ends[k])) | (q == k)
            return seen & (depth[q] - depth[k] < window) if window else seen

        n = len(ends)
        return self._block_mask(sees, None, None, n, n, device=ends.device)


class SizedTree:
    """SDPA for forwards of up to `limit_tokens`, flex attention for larger ones, whose mask would cost more.

    Flex is compiled and tried when the first such forward comes: most runs never pay for it. Where it does not work,
    SDPA goes on.
    """

    def __init__(
        self,
        large: Callable[[], TreeAttention] = FlexTree,
        *,
        limit_tokens: int = SDPA_TOKENS,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.name = f"sdpa to {limit_tokens} tokens, flex above"
        self._small = SdpaTree()
        self._make_large: Callable[[], TreeAttention] | None = large
        self._large: TreeAttention = self._small
        self._limit_tokens = limit_tokens
        self._device = device or torch.device("cpu")
        self._dtype = dtype

    def prepare(self, tree: Tree) -> dict[str, Any]:
        """What the one chosen for this size shares, and which it is."""
        chosen = self._small if len(tree.depth) <= self._limit_tokens else self._for_large()
        return {"tree_by": chosen, "tree_whole": tree, "tree_large": {}, **chosen.prepare(tree)}

    def __call__(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """See `TreeAttention`; capped logits need flex at any size."""
        chosen, tree, prepared = (kwargs.pop(name) for name in ("tree_by", "tree_whole", "tree_large"))
        if kwargs.get("softcap") and chosen is self._small:
            chosen = self._for_large()
            if not prepared:
                prepared.update(chosen.prepare(tree))
            kwargs.update(prepared)
        return chosen(module, query, key, value, attention_mask, **kwargs)

    def _for_large(self) -> TreeAttention:
        if self._make_large is not None:
            make, self._make_large = self._make_large, None
            try:
                self._large, _ = choose([make], device=self._device, dtype=self._dtype)
            except AttentionUnavailable as reason:
                log.warning("large forwards stay with SDPA: %s", reason)
        return self._large


class KernelTree:
    """A variable-length FlashAttention function handed in by the seam, called with the tree's own tensors."""

    name = "flash_attention_3"

    def __init__(self, attend: Callable[..., tuple[Tensor, None]]) -> None:
        self._attend = attend

    def prepare(self, tree: Tree) -> dict[str, Any]:
        """The tree as the kernel wants it."""
        return {
            "tree_kv_index": tree.kv_index,
            "tree_cu_seqlens_q": tree.cu_q,
            "tree_cu_seqlens_k": tree.cu_k,
            "tree_max_seqlen_q": int((tree.cu_q[1:] - tree.cu_q[:-1]).max()),
            "tree_max_seqlen_k": int((tree.cu_k[1:] - tree.cu_k[:-1]).max()),
        }

    def __call__(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """See `TreeAttention`."""
        return self._attend(module, query, key, value, attention_mask, **kwargs)


def choose(
    candidates: Sequence[Callable[[], TreeAttention]], *, device: torch.device, dtype: torch.dtype
) -> tuple[TreeAttention, Mapping[str, str]]:
    """The first candidate that gives the right answer on a small tree, and why the ones before it were passed over.

    Raises:
        AttentionUnavailable: none works.
    """
    refused: dict[str, str] = {}
    for make in candidates:
        label = getattr(make, "__name__", str(make))
        try:
            attention = make()
            label = attention.name
            error = _try_out(attention, device, dtype)
        except Exception as reason:  # noqa: BLE001  whatever keeps a kernel from working, the next one is tried
            refused[label] = f"{type(reason).__name__}: {reason}".splitlines()[0][:200]
            continue
        if error <= (2e-2 if dtype in (torch.bfloat16, torch.float16) else 1e-4):
            return attention, refused
        refused[label] = f"differs from the definition by {error:.3g}"
    raise AttentionUnavailable(f"no tree attention works on {device} in {dtype}: {dict(refused)}")


def example_tree(device: torch.device) -> Tree:
    """A root of 4 tokens with two branches of 3 and 2, the smallest tree that tells a path from a triangle."""
    return Tree(
        kv_index=torch.tensor([*range(4), *range(7), *range(4), 7, 8], device=device),
        cu_q=torch.tensor([0, 4, 7, 9], dtype=torch.int32, device=device),
        cu_k=torch.tensor([0, 4, 11, 17], dtype=torch.int32, device=device),
        depth=torch.tensor([0, 1, 2, 3, 4, 5, 6, 4, 5], device=device),
    )


def _try_out(attention: TreeAttention, device: torch.device, dtype: torch.dtype) -> float:
    """Largest difference from softmax(QK)V written out, on `example_tree`."""
    tree = example_tree(device)
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 4, 9, 64), (1, 2, 9, 64), (1, 2, 9, 64))
    query, key, value = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    module = torch.nn.Linear(1, 1, device=device, dtype=dtype)
    with torch.no_grad():
        out, _ = attention(module, query, key, value, None, scaling=0.125, **attention.prepare(tree))
    k, v = (x.float().repeat_interleave(2, dim=1) for x in (key, value))
    scores = (query.float() @ k.transpose(2, 3) * 0.125).masked_fill(~tree_mask(tree), float("-inf"))
    return float((out.float() - (scores.softmax(-1) @ v).transpose(1, 2)).abs().max())
