"""The loss: a clipped, truncated importance ratio a token, averaged over the whole optimizer step.

Everything is a function of tensors (torch only), with the paper or formula it comes from. A micro-batch's loss is its
sum divided by the tokens of the *step*, so how a step is split never changes its gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from turngate.trainer.settings import LossSettings


def truncated_ratio(logprobs: Tensor, recorded: Tensor, is_cap: float) -> Tensor:
    """`min(pi(t) / mu(t), is_cap)` as a value, with the gradient of that value times `log pi`: `float[M]`.

    mu is the policy version that sampled the token, as recorded by the engine. Truncated importance weights: Ionides
    2008, "Truncated Importance Sampling"; Espeholt et al. 2018, IMPALA, arXiv 1802.01561, section 4.1. Below the cap
    this is the plain ratio; above it the token keeps a gradient with weight `is_cap` instead of an exploding one.

    Args:
        logprobs: `float[M]`, log-probabilities under the weights being trained.
        recorded: `float[M]`, log-probabilities when sampled.
        is_cap: largest weight, at least 1.
    """
    weight = torch.exp(logprobs.detach() - recorded).clamp(max=is_cap)
    return weight * torch.exp(logprobs - logprobs.detach())


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """`min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`: `float[M]`, to be maximised.

    Schulman et al. 2017, PPO, arXiv 1707.06347, equation 7; the two separate bounds are DAPO's "clip-higher", Yu et al.
    2025, arXiv 2503.14476, equation 10.
    """
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.minimum(ratio * advantages, clipped * advantages)


def step_loss(
    logprobs: Tensor, recorded: Tensor, advantages: Tensor, *, step_tokens: int, settings: LossSettings
) -> Tensor:
    """One micro-batch's share of the step's loss: `-sum_t surrogate(t) / step_tokens`, a scalar.

    The token mean over a batch instead of over each sequence is DAPO's token-level loss (arXiv 2503.14476, equation
    12); taking it over the optimizer step makes it independent of packing.

    Args:
        logprobs, recorded, advantages: `float[M]` of the micro-batch's trained tokens.
        step_tokens: trained tokens of the whole step over all micro-batches and ranks.
        settings: bounds.
    """
    ratio = truncated_ratio(logprobs, recorded, settings.is_cap)
    return -clipped_surrogate(ratio, advantages, settings.clip_low, settings.clip_high).sum() / max(step_tokens, 1)


def base_divergence(logprobs: Tensor, base: Tensor) -> Tensor:
    """`exp(b - l) - 1 - (b - l)` a token, the k3 estimate of KL(pi || base), never negative: `float[M]`.

    GRPO's KL term: Shao et al. 2024, DeepSeekMath, arXiv 2402.03300, equation 4; Schulman 2020, "Approximating KL
    Divergence". Its gradient flows through `logprobs` alone.

    Args:
        logprobs: `float[M]`, log-probabilities under the weights being trained.
        base: `float[M]`, those of the same tokens with the adapter off.
    """
    gap = base.detach() - logprobs
    return torch.exp(gap) - 1.0 - gap


@dataclass(slots=True)
class LossSums:
    """Running sums of one step, over micro-batches; divide by `tokens`."""

    tokens: int = 0
    loss: float = 0.0
    ratio: float = 0.0
    kl: float = 0.0
    entropy: float = 0.0
    clipped: float = 0.0
    truncated: float = 0.0
    base_tokens: int = 0
    base_kl: float = 0.0

    @torch.no_grad()
    def add_base(self, divergence: Tensor) -> None:
        """Count one micro-batch's `base_divergence`."""
        self.base_tokens += divergence.numel()
        self.base_kl += float(divergence.double().sum())

    @torch.no_grad()
    def add(self, logprobs: Tensor, recorded: Tensor, advantages: Tensor, entropy: Tensor, s: LossSettings) -> None:
        """Count one micro-batch (`float[M]` each); the loss itself is added by the caller.

        `kl` is the k3 estimate of KL(mu || pi), `(r - 1) - log r`: Schulman 2020, "Approximating KL Divergence".
        """
        log_ratio = (logprobs - recorded).double()
        ratio = log_ratio.exp()
        low = (ratio < 1.0 - s.clip_low) & (advantages < 0)
        high = (ratio > 1.0 + s.clip_high) & (advantages > 0)
        self.tokens += logprobs.numel()
        self.ratio += float(ratio.sum())
        self.kl += float(((ratio - 1.0) - log_ratio).sum())
        self.entropy += float(entropy.double().sum())
        self.clipped += float((low | high).sum())
        self.truncated += float((ratio > s.is_cap).sum())

    def __add__(self, other: LossSums) -> LossSums:
        """The sums of two processes together."""
        return LossSums(**{name: getattr(self, name) + getattr(other, name) for name in self.__slots__})

    def means(self) -> dict[str, float]:
        """`{"ratio_mean", "kl", "entropy", "clip_fraction", "truncated_fraction"}` over the step's tokens.

        `kl_base` too, where the base was asked.
        """
        n = max(self.tokens, 1)
        base = {"kl_base": self.base_kl / self.base_tokens} if self.base_tokens else {}
        return {
            **base,
            "ratio_mean": self.ratio / n,
            "kl": self.kl / n,
            "entropy": self.entropy / n,
            "clip_fraction": self.clipped / n,
            "truncated_fraction": self.truncated / n,
        }
