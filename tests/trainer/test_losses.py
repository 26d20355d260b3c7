"""The loss against references in float64, and its independence of packing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from turngate.trainer.losses import LossSums, base_divergence, clipped_surrogate, step_loss, truncated_ratio
from turngate.trainer.settings import LossSettings

SETTINGS = LossSettings(clip_low=0.2, clip_high=0.28, is_cap=2.0)


def sample(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logprobs = -torch.rand(tokens, generator=generator, dtype=torch.float64) * 3
    recorded = logprobs + torch.randn(tokens, generator=generator, dtype=torch.float64)
    return logprobs, recorded, torch.randn(tokens, generator=generator, dtype=torch.float64)


def reference(logprob: float, recorded: float, advantage: float, s: LossSettings) -> tuple[float, float]:
    """One token's surrogate and its derivative by the log-probability, with plain floats."""
    ratio = min(math.exp(logprob - recorded), s.is_cap)
    clipped = min(max(ratio, 1 - s.clip_low), 1 + s.clip_high)
    if ratio * advantage <= clipped * advantage:
        return ratio * advantage, ratio * advantage
    return clipped * advantage, 0.0


@given(st.integers(0, 10_000))
@settings(max_examples=50, deadline=None)
def test_loss_and_gradient_match_the_formula_token_by_token(seed: int) -> None:
    logprobs, recorded, adv = sample(20, seed)
    logprobs.requires_grad_()
    loss = step_loss(logprobs, recorded, adv, step_tokens=20, settings=SETTINGS)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    expected = [reference(*map(float, token), SETTINGS) for token in zip(logprobs.detach(), recorded, adv, strict=True)]
    assert float(loss) == pytest.approx(-np.mean([value for value, _ in expected]), abs=1e-12)
    np.testing.assert_allclose(gradient, [-slope / 20 for _, slope in expected], atol=1e-12)


def test_below_the_cap_it_is_ppo_of_the_plain_ratio() -> None:
    logprobs, recorded, adv = sample(50, 3)
    recorded = logprobs + (recorded - logprobs).clamp(-0.5, 0.5)
    logprobs.requires_grad_()
    plain = clipped_surrogate(torch.exp(logprobs - recorded), adv, SETTINGS.clip_low, SETTINGS.clip_high)
    (expected,) = torch.autograd.grad(-plain.mean(), logprobs)
    loss = step_loss(logprobs, recorded, adv, step_tokens=50, settings=SETTINGS)
    (found,) = torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(found, expected, atol=1e-14, rtol=1e-12)


def test_a_token_above_the_cap_keeps_a_gradient_of_the_cap() -> None:
    logprobs = torch.tensor([-0.1], dtype=torch.float64, requires_grad=True)
    ratio = truncated_ratio(logprobs, torch.tensor([-9.0], dtype=torch.float64), 2.0)
    (slope,) = torch.autograd.grad(ratio.sum(), logprobs)
    assert (float(ratio), float(slope)) == (2.0, 2.0)


@pytest.mark.parametrize("parts", [1, 2, 7])
def test_splitting_a_step_into_micro_batches_changes_nothing(parts: int) -> None:
    logprobs, recorded, adv = sample(35, 5)
    order = torch.randperm(35, generator=torch.Generator().manual_seed(parts))
    logprobs.requires_grad_()
    whole = torch.autograd.grad(step_loss(logprobs, recorded, adv, step_tokens=35, settings=SETTINGS), logprobs)[0]
    split = torch.zeros_like(whole)
    for part in order.chunk(parts):
        share = step_loss(logprobs[part], recorded[part], adv[part], step_tokens=35, settings=SETTINGS)
        split += torch.autograd.grad(share, logprobs)[0]
    torch.testing.assert_close(split, whole, atol=1e-15, rtol=1e-12)


def test_sums_over_micro_batches_give_the_means_of_the_step() -> None:
    logprobs, recorded, adv = sample(30, 9)
    entropy = torch.linspace(0, 3, 30, dtype=torch.float64)
    sums = LossSums()
    for part in torch.arange(30).chunk(4):
        sums.add(logprobs[part], recorded[part], adv[part], entropy[part], SETTINGS)
    ratio = torch.exp(logprobs - recorded).numpy()
    means = sums.means()
    assert means["ratio_mean"] == pytest.approx(ratio.mean())
    assert means["kl"] == pytest.approx((ratio - 1 - np.log(ratio)).mean())
    assert means["entropy"] == pytest.approx(1.5)
    clipped = ((ratio < 0.8) & (adv.numpy() < 0)) | ((ratio > 1.28) & (adv.numpy() > 0))
    assert means["clip_fraction"] == pytest.approx(clipped.mean())
    assert means["truncated_fraction"] == pytest.approx((ratio > 2).mean())


@given(st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_the_divergence_to_the_base_and_its_gradient_match_the_formula(seed: int) -> None:
    logprobs, base, _ = sample(20, seed)
    logprobs.requires_grad_()
    found = base_divergence(logprobs, base)
    (gradient,) = torch.autograd.grad(found.sum(), logprobs)
    gaps = [float(b) - float(mine) for mine, b in zip(logprobs.detach(), base, strict=True)]
    np.testing.assert_allclose(found.detach(), [math.exp(gap) - 1 - gap for gap in gaps], atol=1e-12)
    np.testing.assert_allclose(gradient, [1 - math.exp(gap) for gap in gaps], atol=1e-12)
    sums = LossSums()
    sums.add_base(found)
    assert sums.means()["kl_base"] == pytest.approx(float(found.mean()))
    assert "kl_base" not in LossSums().means()


def test_the_divergences_estimate_the_kl_of_two_distributions() -> None:
    generator = torch.Generator().manual_seed(0)
    mine, base = (torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(0) for _ in range(2))
    estimate = float((mine.exp() * base_divergence(mine, base)).sum())
    assert estimate == pytest.approx(float((mine.exp() * (mine - base)).sum()), abs=1e-12)
