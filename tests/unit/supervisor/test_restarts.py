"""Restart decisions, with the values worked by hand."""

from __future__ import annotations

import pytest

from rollstream.supervisor.restarts import Decision, Verdict, decide


def _decide(**changes: float) -> Decision:
    arguments = {
        "exit_status": 1,
        "uptime_s": 1.0,
        "failures": 0,
        "max_restarts": 3,
        "backoff_s": 0.5,
    }
    return decide(**{**arguments, **changes})  # type: ignore[arg-type]


def test_status_zero_is_done() -> None:
    assert _decide(exit_status=0).verdict is Verdict.DONE


def test_a_configuration_error_is_not_cured_by_a_restart() -> None:
    assert _decide(exit_status=2).verdict is Verdict.GIVE_UP


@pytest.mark.parametrize(("failures", "delay"), [(0, 0.5), (1, 1.0), (2, 2.0)])
def test_delays_double(failures: int, delay: float) -> None:
    decision = _decide(failures=failures)
    assert (decision.verdict, decision.delay_s) == (Verdict.RESTART, delay)


def test_gives_up_after_the_last_restart() -> None:
    assert _decide(failures=3).verdict is Verdict.GIVE_UP


def test_the_delay_is_bounded() -> None:
    assert _decide(failures=20, max_restarts=100).delay_s == 10.0


def test_a_long_life_forgives_earlier_failures() -> None:
    decision = _decide(failures=3, uptime_s=61.0, exit_status=-9)
    assert (decision.verdict, decision.failures) == (Verdict.RESTART, 1)
