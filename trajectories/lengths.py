"""Whether long samples are lost: lengths of what was trained, beside those of what was finished.

A pipeline that gives up what is slow trains on what is short. The two-sample Kolmogorov-Smirnov
statistic is the largest distance of the two empirical distribution functions; its p-value is the
asymptotic one with Stephens' correction for finite samples (M. A. Stephens, J. R. Stat. Soc. B 32,
1970; Numerical Recipes, section 14.3). What was trained is a part of what was finished, so that the
true p-value is larger still. Groups without variance are left out: that they carry no signal is the
algorithm's choice, and depends on length where the reward does. The figure is for reading, and
decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

# Terms beyond fall below the precision of a double for every lambda above the cut.
_TERMS = 100
_CUT = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthTest:
    """Counts of rollouts, their mean sampled tokens, ``statistic`` D in [0, 1], and
    ``p_value``. What an empty side leaves open is None.
    """

    issued: int
    trained: int
    mean_issued: float | None
    mean_trained: float | None
    statistic: float | None
    p_value: float | None


def compare(counts: Iterable[tuple[int, int, int]]) -> LengthTest:
    """The test on rows of (length in tokens, rollouts issued, of these trained)."""
    table = np.array(sorted(counts), dtype=np.float64).reshape(-1, 3)
    lengths, issued, trained = table.T
    n, m = issued.sum(), trained.sum()
    statistic = p_value = None
    if n and m:
        statistic = float(np.abs(np.cumsum(issued) / n - np.cumsum(trained) / m).max())
        root = math.sqrt(n * m / (n + m))
        p_value = kolmogorov((root + 0.12 + 0.11 / root) * statistic)
    return LengthTest(
        issued=int(n),
        trained=int(m),
        mean_issued=float(lengths @ issued / n) if n else None,
        mean_trained=float(lengths @ trained / m) if m else None,
        statistic=statistic,
        p_value=p_value,
    )


def kolmogorov(value: float) -> float:
    """The probability that Kolmogorov's statistic is above ``value``:
    2 sum_k (-1)^(k-1) exp(-2 k^2 value^2).
    """
    if value < _CUT:
        return 1.0
    k = np.arange(1, _TERMS + 1)
    return float(np.clip(2 * ((-1.0) ** (k - 1) @ np.exp(-2 * (k * value) ** 2)), 0.0, 1.0))


_COUNTS = """
SELECT sampled_tokens, count(), countIf(rollout_id IN (
    SELECT rollout_id FROM training_samples FINAL WHERE run_id = {run:String} AND drop_reason = ''
))
FROM
(
    SELECT rollout_id, argMax(sampled_tokens, attempt) AS sampled_tokens FROM trajectories FINAL
    WHERE run_id = {run:String} AND purpose = 'train' AND rollout_id NOT IN (
        SELECT rollout_id FROM group_samples FINAL
        WHERE run_id = {run:String} AND drop_reason = 'zero_variance'
    )
    GROUP BY rollout_id
)
GROUP BY sampled_tokens
"""


def read_lengths(client: Any, run_id: str) -> LengthTest:
    """The test of a run, from the store."""
    return compare(client.query(_COUNTS, parameters={"run": run_id}).result_rows)
