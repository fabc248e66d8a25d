"""Where a consumer stands in the partitions that it has: what every implementation keeps alike.

A partition is claimed before its first record is handed out, and forgotten when it is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rollstream.bus.claims import Claims
from rollstream.bus.watermark import Watermark

Partition = tuple[str, int]


@dataclass(slots=True, kw_only=True)
class Mark:
    """One partition: ``earlier`` are the claims of its former owners, ``claims`` those and ours."""

    watermark: Watermark
    earlier: Claims
    claims: Claims
    committed: int | None = None


class Marks:
    """The marks of all partitions of one consumer."""

    def __init__(self) -> None:
        self._marks: dict[Partition, Mark] = {}

    def __contains__(self, partition: Partition) -> bool:
        return partition in self._marks

    def claim(self, partition: Partition, *, start: int, end: int, metadata: str = "") -> str:
        """Begin with a partition at ``start``; what is to be committed there before anything of it
        is handed out.
        """
        earlier = Claims.parse(metadata)
        claims = earlier.with_claim(start=start, end=end)
        self._marks[partition] = Mark(watermark=Watermark(start), earlier=earlier, claims=claims)
        return claims.text()

    def begin(self, partition: Partition, start: int) -> None:
        """Begin with a partition that is shared with nobody."""
        none = Claims()
        self._marks[partition] = Mark(watermark=Watermark(start), earlier=none, claims=none)

    def fetched(self, partition: Partition, offset: int) -> int:
        """A record is handed out; how often that may have happened before."""
        mark = self._marks[partition]
        mark.watermark.fetched(offset)
        return mark.earlier.deliveries(offset)

    def done(self, partition: Partition, offset: int) -> None:
        """A record is finished; one of a partition that is lost changes nothing."""
        if (mark := self._marks.get(partition)) is not None:
            mark.watermark.done(offset)

    def position(self, partition: Partition) -> int | None:
        """What may be committed; None before the partition was begun."""
        mark = self._marks.get(partition)
        return mark.watermark.position if mark else None

    def moved(self, assigned: Iterable[Partition]) -> dict[Partition, tuple[int, str]]:
        """(offset, metadata) of the partitions that have moved since they were committed."""
        found = {}
        for partition in assigned:
            mark = self._marks.get(partition)
            if mark is None or mark.committed == (at := mark.watermark.position):
                continue
            left = Claims(ends=tuple(pair for pair in mark.claims.ends if pair[0] > at))
            found[partition] = (at, left.text())
        return found

    def committed(self, offsets: Mapping[Partition, tuple[int, str]]) -> None:
        """The broker has taken these."""
        for partition, (offset, _) in offsets.items():
            if (mark := self._marks.get(partition)) is not None:
                mark.committed = offset

    def forget(self, partitions: Iterable[Partition]) -> None:
        for partition in partitions:
            self._marks.pop(partition, None)
