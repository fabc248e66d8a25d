"""How records become inserts: offset-aligned chunks, a pure state machine per partition.

A chunk never crosses a multiple of ``size``, and a closed chunk is a function of the log and of
where the previous one ended. Its token names its range; replaying it inserts nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rollstream.bus import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Records of one partition, in offset order, to be inserted together."""

    topic: str
    partition: int
    records: tuple[Record, ...]

    @property
    def first(self) -> int:
        return self.records[0].offset

    @property
    def last(self) -> int:
        return self.records[-1].offset

    def token(self, log: str) -> str:
        return f"{log}:{self.topic}:{self.partition}:{self.first}-{self.last}"


@dataclass(slots=True, kw_only=True)
class ChunkBuilder:
    """Collects one partition's records. ``size`` in records, ``limit_bytes`` of their values."""

    size: int
    limit_bytes: int
    _held: list[Record] = field(default_factory=list)
    _bytes: int = 0

    @property
    def held_bytes(self) -> int:
        return self._bytes

    @property
    def held_records(self) -> int:
        return len(self._held)

    def add(self, record: Record) -> list[Chunk]:
        """Take in a record; the chunks that are complete now."""
        done = []
        if self._held and record.offset // self.size != self._held[0].offset // self.size:
            done += self.flush()
        self._held.append(record)
        self._bytes += len(record.value)
        if (record.offset + 1) % self.size == 0 or self._bytes >= self.limit_bytes:
            done += self.flush()
        return done

    def flush(self) -> list[Chunk]:
        """Close what is held, complete or not."""
        if not self._held:
            return []
        first = self._held[0]
        chunk = Chunk(topic=first.topic, partition=first.partition, records=tuple(self._held))
        self._held, self._bytes = [], 0
        return [chunk]
