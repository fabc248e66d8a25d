"""The low watermark of one partition: what may be committed when records finish in any order."""

from __future__ import annotations

import heapq


class Watermark:
    """Offsets below ``position`` are finished; ``commit = position`` loses nothing.

    Invariant: a record that was fetched and is not done is at or above ``position``. Offsets may
    have gaps (compaction, transaction markers): they count as done once a later record has been
    fetched and everything before is done.
    """

    def __init__(self, start: int) -> None:
        self._position = start
        self._next = start
        self._open: list[int] = []
        self._done: set[int] = set()

    @property
    def position(self) -> int:
        """The offset to commit."""
        return self._position

    @property
    def outstanding(self) -> int:
        """Records fetched and not done."""
        return len(self._open) - len(self._done)

    def fetched(self, offset: int) -> None:
        """A record was read. Offsets rise."""
        heapq.heappush(self._open, offset)
        self._next = max(self._next, offset + 1)

    def done(self, offset: int) -> None:
        """A record is finished. Unknown or repeated offsets change nothing."""
        if offset < self._position or offset >= self._next:
            return
        self._done.add(offset)
        while self._open and self._open[0] in self._done:
            self._done.discard(heapq.heappop(self._open))
        self._position = self._open[0] if self._open else self._next
