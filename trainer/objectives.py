"""Objectives as pure functions of per-token tensors.

All arguments are float tensors of the same shape [m]: one entry per sampled token. ``logp`` carries
the gradient; everything else is data.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """``loss`` scalar; the others [m], without gradient: what each token contributed."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor
    token_loss: Tensor


def grpo(
    logp: Tensor,
    logp_behaviour: Tensor,
    advantage: Tensor,
    *,
    tis_clip: float,
    normaliser: float,
) -> PolicyLoss:
    """GRPO with truncated importance sampling, summed over tokens and divided by ``normaliser``.

    The gradient is ``-min(pi / mu, C) * A * grad log pi``: the group-relative advantage of
    DeepSeekMath (arXiv:2402.03300, section 4.1) with the token-mean loss of DAPO (arXiv:2503.14476,
    equation 8) and the truncated weight of IMPALA (arXiv:1802.01561, equation 1, rho-bar), where mu
    is the policy that sampled the token. ``normaliser`` is the number of tokens of the whole step,
    so that micro-batches add up to the same gradient as one batch.
    """
    ratio = torch.exp((logp - logp_behaviour).detach())
    weight = ratio.clamp(max=tis_clip)
    token_loss = -(weight * advantage * logp)
    return PolicyLoss(
        loss=token_loss.sum() / normaliser,
        ratio=ratio,
        clipped=ratio > tis_clip,
        token_loss=token_loss.detach(),
    )


def k3(logp: Tensor, logp_reference: Tensor) -> Tensor:
    """Per-token estimate of KL(pi || reference) on tokens sampled from pi, never negative.

    ``exp(r) - 1 - r`` with ``r = logp_reference - logp`` (Schulman 2020, "Approximating KL
    divergence", k3; used by GRPO, arXiv:2402.03300, equation 4).
    """
    r = logp_reference - logp
    return torch.exp(r) - 1.0 - r


def cross_entropy(logp: Tensor, *, normaliser: float) -> Tensor:
    """Mean negative log-likelihood of the demonstrated tokens."""
    return -logp.sum() / normaliser
