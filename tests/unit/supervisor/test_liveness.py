"""When a service has stalled: a pure decision over looks at its progress."""

from __future__ import annotations

import asyncio

import pytest

from rollstream import liveness
from rollstream.errors import InfraError
from rollstream.liveness import Progress, Stall


def looks(*steps: tuple[float, float] | None, elapsed_s: float = 1.0) -> list[bool]:
    stall = Stall(3.0)
    return [
        stall.look(step and Progress(waiting=step[0], done=step[1]), elapsed_s=elapsed_s)
        for step in steps
    ]


def test_work_that_waits_while_nothing_is_done_is_a_stall() -> None:
    assert looks((5, 7), (5, 7), (9, 7), (9, 7)) == [False, False, False, True]


@pytest.mark.parametrize(
    "steps",
    [
        [(5, n) for n in range(9)],  # something is done
        [(0, 7)] * 9,  # nothing waits
        [None] * 9,  # nothing is known
        [(5, 7), (5, 7), (5, 8), (5, 8), (0, 8), (5, 8), (5, 8)],  # each time anew
    ],
)
def test_what_is_no_stall(steps: list[tuple[float, float] | None]) -> None:
    assert not any(looks(*steps))


def test_what_is_not_known_neither_counts_nor_resets() -> None:
    assert looks((5, 7), (5, 7), None, None, (5, 7), (5, 7))[-1]


async def test_the_watch_returns_at_a_stall_and_not_when_progress_cannot_be_asked() -> None:
    async def stuck() -> Progress | None:
        return Progress(waiting=1, done=0)

    async def unknown() -> Progress | None:
        raise InfraError("no broker")

    await asyncio.wait_for(liveness.watch(stuck, limit_s=0.2), 30)
    watching = asyncio.create_task(liveness.watch(unknown, limit_s=0.05))
    done, _ = await asyncio.wait({watching}, timeout=0.5)
    assert not done
    watching.cancel()
