"""A bound in bytes on what is held at once, for queues whose items differ in size."""

from __future__ import annotations

import asyncio
from collections import deque


class ByteBudget:
    """``take`` waits, first come first served, until there is room; ``give`` makes room.

    An item that is larger than the whole budget has it for itself: it waits until nothing else is
    held.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def held(self) -> int:
        """Bytes taken and not given back."""
        return self._held

    async def take(self, size: int) -> None:
        if not self._waiting and self._fits(size):
            self._held += size
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                # It was let in and will not come.
                self.give(size)
            else:
                self._waiting.remove((size, turn))
                self._let_in()
            raise

    def give(self, size: int) -> None:
        self._held -= size
        self._let_in()

    def _fits(self, size: int) -> bool:
        return self._held + size <= self._limit or not self._held

    def _let_in(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            size, turn = self._waiting.popleft()
            self._held += size
            turn.set_result(None)
