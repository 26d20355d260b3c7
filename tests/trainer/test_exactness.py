"""Agreement of recomputed and recorded log-probabilities, as numbers."""

from __future__ import annotations

import math

import pytest
import torch

from turngate.trainer.exactness import ExactnessSums


def test_nothing_compared_gives_nothing() -> None:
    sums = ExactnessSums(3)
    sums.add(torch.zeros(0), torch.zeros(0), rows=0)
    assert sums.result() is None


def test_means_and_maximum_are_over_all_tokens_of_all_rows() -> None:
    sums = ExactnessSums(3)
    sums.add(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -2.5]), rows=1)
    sums.add(torch.tensor([-3.0]), torch.tensor([-2.9]), rows=1)
    found = sums.result()
    assert found is not None
    assert (found.version, found.rows, found.tokens) == (3, 2, 3)
    assert found.ratio_mean == pytest.approx((1 + math.exp(0.5) + math.exp(-0.1)) / 3)
    assert found.max_abs_dlogp == pytest.approx(0.5)
    assert found.mean_abs_dlogp == pytest.approx(0.2)


def test_an_impossible_record_shows_as_infinite_not_as_agreement() -> None:
    sums = ExactnessSums(0)
    sums.add(torch.tensor([-1.0]), torch.tensor([-math.inf]), rows=1)
    found = sums.result()
    assert found is not None
    assert math.isinf(found.max_abs_dlogp)
