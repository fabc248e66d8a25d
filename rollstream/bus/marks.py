"""Where a consumer stands in the partitions that it has: what every implementation keeps alike.

A partition is claimed before its first record is handed out, and forgotten when it is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rollstream.bus.claims import Claims
from rollstream.bus.watermark import Watermark

Partition = tuple[str, int]


@dataclass(slots=True, kw_only=True)
class Mark:
    """One partition: what is done, and who had it before."""

    watermark: Watermark
    claims: Claims = field(default_factory=Claims)
    committed: int | None = None


class Marks:
    """The marks of all partitions of one consumer."""

    def __init__(self) -> None:
        self._marks: dict[Partition, Mark] = {}

    def __contains__(self, partition: Partition) -> bool:
        return partition in self._marks

    def claim(self, partition: Partition, *, start: int, end: int, metadata: str | None) -> str:
        """Begin with a partition at ``start``; what is to be committed there before anything of it
        is handed out. ``metadata``: what is committed now; None: nothing is, so that nobody had the
        partition before.
        """
        claims = Claims()
        if metadata is not None:
            claims = Claims.parse(metadata).handed_on(start=start, end=end)
        self._marks[partition] = Mark(watermark=Watermark(start), claims=claims)
        return claims.text()

    def begin(self, partition: Partition, start: int) -> None:
        """Begin with a partition that is shared with nobody."""
        self._marks[partition] = Mark(watermark=Watermark(start))

    def fetched(self, partition: Partition, offset: int) -> int:
        """A record is handed out; how often that may have happened before."""
        mark = self._marks[partition]
        mark.watermark.fetched(offset)
        return mark.claims.deliveries(offset)

    def begin_alone(self, partition: Partition, offset: int) -> tuple[int, tuple[int, str]] | None:
        """A record is to be handled alone: how often it was before, and what is to be committed
        first. None: the partition is lost.
        """
        if (mark := self._marks.get(partition)) is None:
            return None
        before = mark.claims.begun_alone(offset)
        mark.claims = mark.claims.begin_alone(offset)
        at = mark.watermark.position
        return before, (at, mark.claims.above(at).text())

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
            found[partition] = (at, mark.claims.above(at).text())
        return found

    def committed(self, offsets: Mapping[Partition, tuple[int, str]]) -> None:
        """The broker has taken these."""
        for partition, (offset, _) in offsets.items():
            if (mark := self._marks.get(partition)) is not None:
                mark.committed = offset

    def forget(self, partitions: Iterable[Partition]) -> None:
        for partition in partitions:
            self._marks.pop(partition, None)
