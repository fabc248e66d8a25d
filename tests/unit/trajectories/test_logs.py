"""Topics against store: each way in which they can disagree, planted."""

from __future__ import annotations

from trajectories.logs import Topics, compare


def _compare(low: int, end: int, last: int, *, topic: str = "t", settled: bool = False) -> Topics:
    return compare("log", {(topic, 0): (low, end)}, {(topic, 0): last}, settled=settled)


def test_all_stored_is_no_problem() -> None:
    found = _compare(0, 10, 9, settled=True)
    assert (found.lag, found.problems) == ({}, ())


def test_behind_is_lag_and_a_problem_only_when_settled() -> None:
    found = _compare(0, 10, 6)
    assert (found.lag, found.problems) == ({"t/0": 3}, ())
    assert _compare(0, 10, 6, settled=True).problems == ("t/0: 3 offsets from 7 not stored",)


def test_ahead_is_another_log_under_the_name() -> None:
    (problem,) = _compare(0, 10, 10).problems
    assert "made anew" in problem


def test_retention_that_lost_what_was_not_stored() -> None:
    assert _compare(8, 10, 4).problems == ("t/0 lost offsets 5..7 before they were stored",)
    assert _compare(5, 10, 4).problems == ()
    assert _compare(8, 10, 4, topic="curriculum").problems == ()


def test_a_topic_that_is_gone() -> None:
    assert "not on the broker" in compare("log", {}, {("t", 0): 1}, settled=False).problems[0]
