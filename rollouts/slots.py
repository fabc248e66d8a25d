"""A bounded number of places, given by priority and then in order of asking."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections.abc import AsyncIterator


class PrioritySlots:
    """``take(priority)`` waits for a place; higher priority first, else first come first served.

    Invariant: ``taken`` never exceeds ``limit``; a waiter that is cancelled neither keeps nor loses
    a place.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiters: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = itertools.count()
        self.taken = 0

    @contextlib.asynccontextmanager
    async def take(self, priority: int = 0) -> AsyncIterator[None]:
        await self._acquire(priority)
        try:
            yield
        finally:
            self._release()

    async def _acquire(self, priority: int) -> None:
        if self.taken < self._limit and not self._waiters:
            self.taken += 1
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiters, (-priority, next(self._order), future))
        try:
            await future
        except asyncio.CancelledError:
            # The place may have been given in the same turn of the loop: pass it on.
            if future.done() and not future.cancelled():
                self._release()
            raise

    def _release(self) -> None:
        while self._waiters:
            _, _, future = heapq.heappop(self._waiters)
            if not future.done():
                future.set_result(None)
                return
        self.taken -= 1
