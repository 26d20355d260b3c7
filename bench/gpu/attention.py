"""Tree attention by torch flex attention against SDPA with a mask: error, speed and memory, forward and backward.

The reference is SDPA in float64 on the same rounded inputs, so both ways are measured by the same rule: flex attention
is right where its error is no more than a small multiple of SDPA's own in that precision. One JSON line a tree.

python bench/gpu/attention.py                        # on the GPU: bf16, Qwen2.5-Coder-0.5B's heads, up to 7k tokens
python bench/gpu/attention.py --device cpu --sizes small --eager --dtype float32
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from turngate.trainer.attention import FlexTree, SdpaTree, Tree, TreeAttention

HEADS, KV_HEADS, HEAD_DIM = 14, 2, 64
"""Of Qwen2.5-Coder-0.5B."""

SHAPES: dict[str, dict[str, tuple[int, Sequence[int], int]]] = {
    "small": {"chain": (70, (), 0), "fork": (40, (17, 30), 0), "two levels": (33, (20, 9, 14), 3)},
    "large": {
        "one long row": (4096, (), 0),
        "a group of 8, shared prompt": (1400, (300, 420, 150, 512, 260, 333, 480, 90), 0),
        "two levels, 8 x 3": (1400, (200,) * 8, 3),
        "64 above a multiple of 128": (1472, (512,), 0),
        "not a multiple of 128": (1111, (7, 131, 257, 513), 0),
        "7k tokens": (1400, (500,) * 6, 2),
    },
}
"""Root length, branch lengths, and how many leaves of half a branch's length hang on each branch."""

ALLOWED = 3.0
"""How many times SDPA's own error flex attention may have, in a mean absolute sense."""


def make_tree(root: int, branches: Sequence[int], leaves: int, device: torch.device) -> Tree:
    """A tree of one root, branches on it and leaves on them, packed depth first."""
    paths: list[list[tuple[int, int]]] = []
    at = 0

    def grow(length: int, above: list[tuple[int, int]], below: Sequence[Sequence[int]]) -> None:
        nonlocal at
        own = (at, at + length)
        at += length
        paths.append([*above, own])
        for child in below:
            grow(child[0], [*above, own], [[one] for one in child[1:]])

    grow(root, [], [[length, *[max(1, length // 2)] * leaves] for length in branches])
    kv = [torch.arange(start, end) for path in paths for start, end in path]
    lengths_k = torch.tensor([sum(end - start for start, end in path) for path in paths])
    lengths_q = torch.tensor([path[-1][1] - path[-1][0] for path in paths])
    depth = [torch.arange(path[-1][1] - path[-1][0]) + sum(e - s for s, e in path[:-1]) for path in paths]
    ends = [torch.cat([torch.zeros(1, dtype=torch.int64), one.cumsum(0)]).int() for one in (lengths_q, lengths_k)]
    return Tree(torch.cat(kv).to(device), ends[0].to(device), ends[1].to(device), torch.cat(depth).to(device))


def passes(attention: TreeAttention, tree: Tree, tensors: Sequence[Tensor], upstream: Tensor) -> list[Tensor]:
    """The output and the gradients of query, key and value; on a CPU, where flex has no backward, the output alone."""
    backward = upstream.device.type != "cpu"
    query, key, value = (one.detach().clone().requires_grad_(backward) for one in tensors)
    kwargs = attention.prepare(tree)
    out, _ = attention(torch.nn.Identity(), query, key, value, None, scaling=HEAD_DIM**-0.5, **kwargs)
    if backward:
        out.backward(upstream.to(out.dtype))
    grads = [one.grad for one in (query, key, value)]
    return [out.detach(), *(grad for grad in grads if grad is not None)]


def timed(work: Callable[[], Any], device: torch.device, repeats: int) -> tuple[float, float]:
    """Median milliseconds of a pass, and peak memory above what was held, in MiB (0 on CPU)."""
    cuda = device.type == "cuda"
    work()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated() if cuda else 0
    spent = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        if cuda:
            torch.cuda.synchronize()
        spent.append((time.perf_counter() - began) * 1e3)
    peak = (torch.cuda.max_memory_allocated() - held) / 2**20 if cuda else 0.0
    return sorted(spent)[len(spent) // 2], peak


def compare(
    name: str, tree: Tree, device: torch.device, dtype: torch.dtype, eager: bool, repeats: int
) -> dict[str, Any]:
    """One tree: errors of both ways against float64, and what each costs."""
    n = int(tree.cu_q[-1])
    generator = torch.Generator().manual_seed(n)
    shapes = [(1, heads, n, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    tensors = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    upstream = torch.randn((1, n, HEADS, HEAD_DIM), generator=generator).to(device, dtype)
    exact = passes(SdpaTree(), tree, [one.double() for one in tensors], upstream.double())
    found: dict[str, Any] = {"tree": name, "tokens": n, "segments": len(tree.cu_q) - 1, "dtype": str(dtype)}
    errors: dict[str, list[float]] = {}
    for attention in (SdpaTree(), FlexTree(compiled=not eager)):
        began = time.perf_counter()
        got = passes(attention, tree, tensors, upstream)
        first_s = time.perf_counter() - began
        gaps = [(one.double() - true).abs() for one, true in zip(got, exact, strict=True)]
        errors[attention.name] = [float(gap.mean()) for gap in gaps]
        ms, peak = timed(lambda chosen=attention: passes(chosen, tree, tensors, upstream), device, repeats)  # type: ignore[misc]
        found[attention.name] = {
            "mean_abs_error": dict(zip(("out", "dq", "dk", "dv"), errors[attention.name], strict=False)),
            "max_abs_error": dict(zip(("out", "dq", "dk", "dv"), (float(gap.max()) for gap in gaps), strict=False)),
            "first_s": round(first_s, 2),
            "pass_ms": round(ms, 3),
            "peak_mib": round(peak, 1),
        }
    floor = 1e-6
    found["worst_error_ratio"] = max(f / max(s, floor) for f, s in zip(errors["flex"], errors["sdpa"], strict=True))
    found["speed_up"] = found["sdpa"]["pass_ms"] / found["flex"]["pass_ms"]
    found["ok"] = found["worst_error_ratio"] <= ALLOWED
    return found


def very_low_scores(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Whether all is finite where every score is about -120: there one kernel of torch's gives NaN in a gradient."""
    n, generator = 704, torch.Generator().manual_seed(0)
    tree = make_tree(n, (), 0, device)
    query, key, value = (
        torch.randn((1, heads, n, HEAD_DIM), generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    query, key = query * 0.1, key * 0.1
    query[..., 0], key[..., 0] = 1.0, -120 * HEAD_DIM**0.5
    tensors = [one.to(device, dtype) for one in (query, key, value)]
    upstream = torch.randn((1, n, HEADS, HEAD_DIM), generator=generator).to(device, dtype)
    finite = all(bool(torch.isfinite(one).all()) for one in passes(SdpaTree(), tree, tensors, upstream))
    return {"tree": "very low scores", "tokens": n, "dtype": str(dtype), "ok": finite}


def main() -> int:
    """A line a tree; status 1 when flex attention is worse than bf16's own error on one, or a gradient is NaN."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--sizes", default="large", choices=sorted(SHAPES))
    parser.add_argument("--eager", action="store_true", help="flex attention uncompiled, as on a CPU")
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    device, well = torch.device(args.device), True
    for name, (root, branches, leaves) in SHAPES[args.sizes].items():
        tree = make_tree(root, branches, leaves, device)
        found = compare(name, tree, device, getattr(torch, args.dtype), eager=args.eager, repeats=args.repeats)
        print(json.dumps(found), flush=True)
        well = well and found["ok"]
    low = very_low_scores(device, getattr(torch, args.dtype))
    print(json.dumps(low), flush=True)
    return 0 if well and low["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
