"""The test of lengths, against values of the literature and its definition."""

from __future__ import annotations

import random

import pytest

from trajectories.lengths import compare, kolmogorov


# Critical values of Kolmogorov's distribution (Smirnov 1948, table).
@pytest.mark.parametrize(("value", "expected"), [(1.22, 0.10), (1.36, 0.05), (1.63, 0.01)])
def test_critical_values(value: float, expected: float) -> None:
    assert kolmogorov(value) == pytest.approx(expected, rel=0.03)
    assert kolmogorov(0.0) == 1.0


def test_statistic_is_the_largest_distance() -> None:
    # Of lengths 1, 2, 3, 4 only the shorter half was trained.
    found = compare([(1, 1, 1), (2, 1, 1), (3, 1, 0), (4, 1, 0)])
    assert (found.issued, found.trained, found.statistic) == (4, 2, 0.5)
    assert (found.mean_issued, found.mean_trained) == (2.5, 1.5)


def test_what_is_lost_by_length_is_seen_and_what_is_lost_by_chance_is_not() -> None:
    rng = random.Random(0)
    chance = compare([(n, 10, sum(rng.random() < 0.5 for _ in range(10))) for n in range(100)])
    assert chance.p_value is not None and chance.p_value > 0.5
    by_length = compare([(n, 10, 10 if n < 60 else 0) for n in range(100)])
    assert by_length.p_value is not None and by_length.p_value < 1e-6


def test_nothing_trained_is_no_figure() -> None:
    found = compare([(5, 3, 0)])
    assert (found.statistic, found.p_value, found.mean_trained) == (None, None, None)
    assert compare([]).issued == 0
