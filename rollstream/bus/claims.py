"""How often a record may have been delivered before: what one owner of a partition tells the next.

Whoever gets a partition of a group claims it before it hands out a record: it commits the end of
the log as it is now, beside the offset. The owner before may have read as far as that and no
further. The number of earlier owners that may have read a record is a bound on its earlier
deliveries, and it rises with each of them: whoever does the work again knows that it is again, and
which time it is.

The text travels as the metadata of the committed offset, which Kafka limits to 4,096 bytes
(``offset.metadata.max.bytes``).
"""

from __future__ import annotations

from dataclasses import dataclass

# 22 bytes each ("9223372036854775807:n,"): well below the limit.
_MAX_ENDS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """``ends``: (how far they may have read, number of earlier owners), rising."""

    ends: tuple[tuple[int, int], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Claims:
        """The claims in a committed offset's metadata; none where it is not one of ours."""
        try:
            pairs = [pair.split(":") for pair in text.split(",")] if text else []
            return cls(ends=tuple(sorted((int(end), int(count)) for end, count in pairs)))
        except ValueError:
            return cls()

    def text(self) -> str:
        return ",".join(f"{end}:{count}" for end, count in self.ends)

    def handed_on(self, *, start: int, end: int) -> Claims:
        """After one more owner, who may have read from ``start`` up to ``end``."""
        counts = {at: count for at, count in self.ends if at > start}
        if end > start:
            counts[end] = counts.get(end, 0) + 1
        ends = sorted(counts.items())
        while len(ends) > _MAX_ENDS:
            # The bound may only rise: the lowest is counted with the next.
            (_, lowest), (at, count) = ends[0], ends[1]
            ends[:2] = [(at, lowest + count)]
        return Claims(ends=tuple(ends))

    def above(self, offset: int) -> Claims:
        """Without what no longer matters once everything below ``offset`` is finished."""
        return Claims(ends=tuple(pair for pair in self.ends if pair[0] > offset))

    def deliveries(self, offset: int) -> int:
        """A bound on how often the record at ``offset`` was handed out by them."""
        return sum(count for end, count in self.ends if end > offset)
