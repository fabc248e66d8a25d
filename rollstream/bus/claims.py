"""How often a record may have been delivered before: what one owner of a partition tells the next.

Whoever gets a partition of a group claims it before it hands out a record: it commits the end of
the log as it is now, beside the offset. A record below the end of an earlier claim may have been
handed out then; a record at or above all of them never was. The number of earlier claims that reach
beyond a record is therefore a bound on its earlier deliveries, and it rises with each of them:
whoever does the work again knows that it is again, and which time it is.

The text travels as the metadata of the committed offset, which Kafka limits to 4,096 bytes
(``offset.metadata.max.bytes``).
"""

from __future__ import annotations

from dataclasses import dataclass

# 22 bytes a claim at most ("9223372036854775807:n"): well below the limit.
_MAX_CLAIMS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """``ends``: (end of the log, number of claims made at it), rising."""

    ends: tuple[tuple[int, int], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Claims:
        """The claims in a committed offset's metadata; none where it is not ours."""
        try:
            pairs = [pair.split(":") for pair in text.split(",")] if text else []
            return cls(ends=tuple(sorted((int(end), int(count)) for end, count in pairs)))
        except ValueError:
            return cls()

    def text(self) -> str:
        return ",".join(f"{end}:{count}" for end, count in self.ends)

    def with_claim(self, *, start: int, end: int) -> Claims:
        """After one more claim: of the records from ``start`` to ``end``."""
        counts = {at: count for at, count in self.ends if at > start}
        if end > start:
            counts[end] = counts.get(end, 0) + 1
        ends = sorted(counts.items())
        while len(ends) > _MAX_CLAIMS:
            # The bound may only rise: the lowest is counted with the next.
            (_, lowest), (at, count) = ends[0], ends[1]
            ends[:2] = [(at, lowest + count)]
        return Claims(ends=tuple(ends))

    def deliveries(self, offset: int) -> int:
        """A bound on how often the record at ``offset`` was handed out under these claims."""
        return sum(count for end, count in self.ends if end > offset)
