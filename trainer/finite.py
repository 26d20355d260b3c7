"""Gradients and weights that are not numbers: found before they spoil what is trained or served.

One infinity anywhere makes an optimizer step write NaN over the whole adapter, and nothing brings it back. Functions of
a model and of tensors; they look, whoever calls them decides.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from turngate.trainer.errors import NotFinite

IN_A_ROW = 3
"""So many steps passed over one after the other end the run: no chance hit, and nothing is learnt."""


def spoilt_gradient(model: torch.nn.Module) -> str:
    """What is wrong with the gradients, in words; empty when all are finite.

    Their total norm is looked at, once a step: with DDP and FSDP2 it is the same in all processes.
    """
    there = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    if not there or bool(torch.isfinite(_whole(torch.nn.utils.get_total_norm(list(there.values()))))):
        return ""
    spoilt = [name for name, grad in there.items() if not bool(torch.isfinite(_whole(grad)).all())]
    if not spoilt:
        return f"the norm of {len(there)} gradients overflows"
    return f"{len(spoilt)} of {len(there)} gradients are not finite, that of {spoilt[-1]} among them"


def check_weights(weights: Mapping[str, Tensor]) -> None:
    """Refuse an adapter that is not made of numbers.

    Raises:
        NotFinite: a tensor holds NaN or an infinity; says which.
    """
    spoilt = [name for name, tensor in weights.items() if not bool(torch.isfinite(tensor).all())]
    if spoilt:
        raise NotFinite(
            f"{len(spoilt)} of the adapter's {len(weights)} tensors are not finite ({spoilt[0]}): it is not written; "
            "go on from the last checkpoint, or begin again, with a lower learning rate or in float32"
        )


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
