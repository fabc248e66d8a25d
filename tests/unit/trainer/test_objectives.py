"""Objectives against numbers worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from trainer.objectives import cross_entropy, grpo, k3


def test_grpo_by_hand() -> None:
    logp = torch.tensor([math.log(0.5), math.log(0.9), math.log(0.1)], requires_grad=True)
    behaviour = torch.tensor([math.log(0.25), math.log(0.3), math.log(0.2)])
    advantage = torch.tensor([1.0, 2.0, -1.0])
    result = grpo(logp, behaviour, advantage, tis_clip=2.5, normaliser=3.0)
    # Ratios 2, 3, 0.5; the second is cut to 2.5.
    torch.testing.assert_close(result.ratio, torch.tensor([2.0, 3.0, 0.5]))
    assert result.clipped.tolist() == [False, True, False]
    expected = -(2 * 1 * math.log(0.5) + 2.5 * 2 * math.log(0.9) + 0.5 * -1 * math.log(0.1)) / 3
    assert result.loss.item() == pytest.approx(expected, rel=1e-6)
    result.loss.backward()
    # The weight carries no gradient: d loss / d logp = -weight * advantage / normaliser.
    torch.testing.assert_close(logp.grad, torch.tensor([-2.0 / 3, -5.0 / 3, 0.5 / 3]))


def test_on_policy_the_ratio_is_one() -> None:
    logp = torch.tensor([-0.1, -2.0], requires_grad=True)
    result = grpo(logp, logp.detach(), torch.ones(2), tis_clip=2.0, normaliser=2.0)
    torch.testing.assert_close(result.ratio, torch.ones(2))


def test_k3_is_zero_at_equality_and_never_negative() -> None:
    logp = torch.tensor([-1.0, -2.0])
    assert k3(logp, logp).tolist() == [0.0, 0.0]
    # r = 1: e - 1 - 1.
    assert k3(torch.tensor([-2.0]), torch.tensor([-1.0])).item() == pytest.approx(math.e - 2)
    assert (k3(torch.randn(100), torch.randn(100)) >= 0).all()


def test_cross_entropy_by_hand() -> None:
    logp = torch.tensor([math.log(0.5), math.log(0.25)])
    assert cross_entropy(logp, normaliser=2.0).item() == pytest.approx(math.log(8) / 2)
