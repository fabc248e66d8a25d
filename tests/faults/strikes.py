"""What is done to a process, and how long it takes until it is back."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from enum import StrEnum

from rollstream.bus.kafka import KafkaBus
from rollstream.errors import RollstreamError
from rollstream.supervisor.child import State
from rollstream.supervisor.supervisor import Supervisor
from rollstream.topics import TRAJECTORIES
from tests.waiting import until

BROKER = "broker"
# Longer than ``bus.session_timeout_s`` of the run: who is stopped has lost its partitions when it
# wakes, and goes on with what it holds.
PAUSE_S = 8.0
_BACK_S = 120.0


class Kind(StrEnum):
    KILL = "kill"
    PAUSE = "pause"


async def strike(supervisor: Supervisor, target: str, kind: Kind) -> float:
    """Strike a service or the broker; the seconds from the blow (a pause: from its end) until it
    is ready again.
    """
    victim = _pid(supervisor, target)
    os.kill(victim, signal.SIGKILL if kind is Kind.KILL else signal.SIGSTOP)
    if kind is Kind.PAUSE:
        # The fault is the time that it lasts.
        await asyncio.sleep(PAUSE_S)
        os.kill(victim, signal.SIGCONT)
    began = time.monotonic()
    if target == BROKER:
        await until(lambda: _serves(supervisor, victim, kind), seconds=_BACK_S)
    else:
        await until(lambda: _is_back(supervisor, target, victim, kind), seconds=_BACK_S)
    return time.monotonic() - began


def _pid(supervisor: Supervisor, target: str) -> int:
    pids = supervisor.broker_pids if target == BROKER else [supervisor.children[target].pid]
    assert pids and pids[0], f"{target} does not run"
    return pids[0]


def _is_back(supervisor: Supervisor, target: str, victim: int, kind: Kind) -> bool:
    child = supervisor.children[target]
    fresh = child.pid not in (None, victim) or kind is Kind.PAUSE
    # The trainer is through with its stages when it has ended by itself.
    return fresh and child.state in (State.READY, State.BUSY, State.STOPPED)


async def _serves(supervisor: Supervisor, victim: int, kind: Kind) -> bool:
    if not supervisor.broker_alive or (kind is Kind.KILL and supervisor.broker_pids == [victim]):
        return False
    try:
        async with asyncio.timeout(5):
            await KafkaBus(supervisor.config).end_offsets(TRAJECTORIES)
    except (RollstreamError, TimeoutError):
        return False
    return True
