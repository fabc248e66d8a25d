"""A bound in bytes: never exceeded, in order, and no byte is lost to a cancelled wait."""

from __future__ import annotations

import asyncio

from rollstream.budget import ByteBudget


def _begin(budget: ByteBudget, *sizes: int) -> list[asyncio.Task[None]]:
    return [asyncio.create_task(budget.take(size)) for size in sizes]


async def _turn() -> None:
    """Let every task that can go on do so."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_takers_wait_in_order() -> None:
    budget = ByteBudget(10)
    await budget.take(6)
    large, small = _begin(budget, 5, 1)
    await _turn()
    # The small one would fit, and does not pass the large one.
    assert (large.done(), small.done(), budget.held) == (False, False, 6)
    budget.give(6)
    await _turn()
    assert (large.done(), small.done(), budget.held) == (True, True, 6)


async def test_one_larger_than_the_budget_has_it_for_itself() -> None:
    budget = ByteBudget(10)
    await budget.take(1)
    (huge,) = _begin(budget, 100)
    await _turn()
    assert not huge.done()
    budget.give(1)
    await huge
    (next_one,) = _begin(budget, 1)
    await _turn()
    assert not next_one.done()
    budget.give(100)
    await next_one
    assert budget.held == 1


async def test_a_cancelled_wait_leaves_its_place_and_its_bytes() -> None:
    budget = ByteBudget(10)
    await budget.take(10)
    first, second = _begin(budget, 10, 4)
    await _turn()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    # One that is cancelled in the moment in which it is let in.
    (third,) = _begin(budget, 6)
    await _turn()
    budget.give(10)
    third.cancel()
    await asyncio.gather(third, return_exceptions=True)
    await second
    assert budget.held == 4
