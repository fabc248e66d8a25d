"""In which order the groups of several partitions are taken: one that only the logs decide.

Fetches of different partitions arrive in any order, and differently each time. What is released
here is ordered by (timestamp, partition, offset) of the partitions' next records, so that a trainer
that resumes on a log takes the same groups in the same order as one that was never interrupted. A
record is held until every other partition has one as well or is known to be at its end; while the
log grows, what is written to such a partition later comes later, whatever its timestamp says.

What is held is bounded by what one fetch of each partition brings: a partition that has more is
served again only after the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from rollstream.bus import Record


class LogOrder:
    """Merges partitions. ``partitions``: all of them, by number."""

    def __init__(self, partitions: Iterable[int]) -> None:
        self._held: dict[int, deque[Record]] = {p: deque() for p in sorted(partitions)}
        # Empty here, and at their end when they were last asked for.
        self._ended: set[int] = set()

    @property
    def blocked(self) -> bool:
        """Whether something is held because it is not known what else there is."""
        waits = any(not held and p not in self._ended for p, held in self._held.items())
        return waits and any(self._held.values())

    def add(self, records: Iterable[Record]) -> None:
        """Take in what was fetched."""
        for record in records:
            self._held[record.partition].append(record)
            self._ended.discard(record.partition)

    def at_end(self, partitions: Iterable[int]) -> None:
        """These were read to their end."""
        self._ended.update(p for p in partitions if not self._held[p])

    def take(self) -> list[Record]:
        """What may be released, in order."""
        released = []
        while not self.blocked and (heads := [held[0] for held in self._held.values() if held]):
            first = min(heads, key=lambda r: (r.timestamp_ms, r.partition, r.offset))
            released.append(self._held[first.partition].popleft())
        return released
