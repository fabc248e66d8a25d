"""How often a record may have been delivered before: what one owner of a partition tells the next.

Whoever gets a partition of a group claims it before it hands out a record: it commits the end of
the log as it is now, beside the offset. The owner before may have read as far as that and no
further. The number of earlier owners that may have read a record is a bound on its earlier
deliveries, and it rises with each of them: whoever does the work again knows that it is again, and
which time it is.

A record that may have killed its owners is handled alone, and that is written down beforehand
(``alone``): an owner that dies meanwhile died of it.

The text travels as the metadata of the committed offset, which Kafka limits to 4,096 bytes
(``offset.metadata.max.bytes``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

# 22 bytes each ("9223372036854775807:n,"): well below the limit.
_MAX_ENDS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """``ends``: (how far they may have read, number of earlier owners), rising. ``alone``: (the
    offset of the record that is handled alone, how often that was begun).
    """

    ends: tuple[tuple[int, int], ...] = ()
    alone: tuple[int, int] | None = None

    @classmethod
    def parse(cls, text: str) -> Claims:
        """The claims in a committed offset's metadata; none where it is not one of ours."""
        try:
            ends, _, alone = text.partition(";")
            return cls(ends=tuple(sorted(_pairs(ends))), alone=next(iter(_pairs(alone)), None))
        except ValueError:
            return cls()

    def text(self) -> str:
        alone = f";{self.alone[0]}:{self.alone[1]}" if self.alone else ""
        return ",".join(f"{end}:{count}" for end, count in self.ends) + alone

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
        return replace(self, ends=tuple(ends)).above(start)

    def above(self, offset: int) -> Claims:
        """Without what no longer matters once everything below ``offset`` is finished."""
        alone = self.alone if self.alone and self.alone[0] >= offset else None
        return Claims(ends=tuple(pair for pair in self.ends if pair[0] > offset), alone=alone)

    def deliveries(self, offset: int) -> int:
        """A bound on how often the record at ``offset`` was handed out by them."""
        return sum(count for end, count in self.ends if end > offset)

    def begun_alone(self, offset: int) -> int:
        """How often the record at ``offset`` was begun alone."""
        return self.alone[1] if self.alone and self.alone[0] == offset else 0

    def begin_alone(self, offset: int) -> Claims:
        """Once more."""
        return replace(self, alone=(offset, self.begun_alone(offset) + 1))


def _pairs(text: str) -> list[tuple[int, int]]:
    pairs = [pair.split(":") for pair in text.split(",")] if text else []
    return [(int(first), int(second)) for first, second in pairs]
