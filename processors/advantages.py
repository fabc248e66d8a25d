"""Group-relative advantages: numpy, float64 [n] in, float64 [n] out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

# A group whose rewards differ by less than this has nothing to say: float residue is no signal.
STD_FLOOR = 1e-3


def group_std(rewards: Array) -> Array:
    """``(r - mean) / std`` with the sample deviation (GRPO, arXiv:2402.03300, section 4.1.2)."""
    if len(rewards) < 2:
        return np.zeros_like(rewards)
    std = rewards.std(ddof=1)
    return (rewards - rewards.mean()) / std if std >= STD_FLOOR else np.zeros_like(rewards)


def group_mean(rewards: Array) -> Array:
    """``r - mean`` (Dr. GRPO, arXiv:2503.20783, section 3.2: no division by the deviation)."""
    if not has_signal(rewards):
        return np.zeros_like(rewards)
    centred: Array = rewards - rewards.mean()
    return centred


def leave_one_out(rewards: Array) -> Array:
    """``r_i`` minus the mean of the others (RLOO, arXiv:2402.14740, equation 8)."""
    count = len(rewards)
    if not has_signal(rewards):
        return np.zeros_like(rewards)
    scaled: Array = (rewards - rewards.mean()) * (count / (count - 1))
    return scaled


def has_signal(rewards: Array) -> bool:
    """Whether the group's rewards differ at all."""
    return len(rewards) >= 2 and float(rewards.std(ddof=1)) >= STD_FLOOR


ESTIMATORS: dict[str, Callable[[Array], Array]] = {
    "group_std": group_std,
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
}
