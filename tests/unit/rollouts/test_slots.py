"""Places: never more than the limit, the important ones first, none lost."""

from __future__ import annotations

import asyncio
import random

from rollouts.slots import PrioritySlots
from tests.waiting import until


async def test_higher_priority_goes_first_and_equals_in_order() -> None:
    slots, order = PrioritySlots(1), []

    async def work(name: str, priority: int) -> None:
        async with slots.take(priority):
            order.append(name)

    async with slots.take():
        waiting = [
            asyncio.create_task(work(name, priority))
            for name, priority in (("a", 0), ("b", 0), ("eval", 1), ("c", 0))
        ]
        await asyncio.sleep(0)
        assert order == []
    await asyncio.gather(*waiting)
    assert order == ["eval", "a", "b", "c"]
    assert slots.taken == 0


async def test_cancelled_waiters_keep_and_lose_nothing() -> None:
    """Many takers, cancelled at random moments; at the end every place is free."""
    rng = random.Random(0)
    slots, most = PrioritySlots(3), 0

    async def work() -> None:
        nonlocal most
        async with slots.take(rng.randint(0, 1)):
            most = max(most, slots.taken)
            for _ in range(rng.randint(0, 3)):
                await asyncio.sleep(0)

    for _ in range(200):
        tasks = [asyncio.create_task(work()) for _ in range(12)]
        for _ in range(rng.randint(0, 4)):
            await asyncio.sleep(0)
        for task in rng.sample(tasks, 5):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert slots.taken == 0
    assert most == 3


async def test_a_place_given_to_a_taker_that_is_cancelled_passes_on() -> None:
    slots = PrioritySlots(1)
    got = asyncio.Event()

    async def work() -> None:
        async with slots.take():
            got.set()

    holding = slots.take()
    await holding.__aenter__()
    first, second = asyncio.create_task(work()), asyncio.create_task(work())
    await asyncio.sleep(0)
    await holding.__aexit__(None, None, None)
    # The place is `first`'s, which has not run since.
    first.cancel()
    await until(got.is_set)
    await asyncio.gather(first, second, return_exceptions=True)
    assert slots.taken == 0
