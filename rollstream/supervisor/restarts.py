"""Whether a process that ended is started again: a pure decision."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rollstream.errors import ConfigError

# A process that lived this long has recovered: its failures are forgotten.
_FORGIVEN_AFTER_S = 60.0
_LONGEST_DELAY_S = 10.0


class Verdict(StrEnum):
    DONE = "done"
    RESTART = "restart"
    GIVE_UP = "give up"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    verdict: Verdict
    failures: int
    delay_s: float = 0.0


def decide(
    *, exit_status: int, uptime_s: float, failures: int, max_restarts: int, backoff_s: float
) -> Decision:
    """What to do about an exit that was not asked for.

    Status 0 is done; a configuration error is not cured by a restart; anything else is tried again
    with exponential back-off, ``max_restarts`` times in a row.
    """
    if exit_status == 0:
        return Decision(verdict=Verdict.DONE, failures=failures)
    if exit_status == ConfigError.exit_status:
        return Decision(verdict=Verdict.GIVE_UP, failures=failures + 1)
    failures = 1 if uptime_s >= _FORGIVEN_AFTER_S else failures + 1
    if failures > max_restarts:
        return Decision(verdict=Verdict.GIVE_UP, failures=failures)
    delay = min(_LONGEST_DELAY_S, backoff_s * 2.0 ** (failures - 1))
    return Decision(verdict=Verdict.RESTART, failures=failures, delay_s=delay)
