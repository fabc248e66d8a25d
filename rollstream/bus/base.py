"""The bus contract: what services need of Kafka and nothing else. ``KafkaBus`` keeps it, and its
in-process twin ``rollstream.testing.MemoryBus``; both run through ``rollstream.testing.bus_suite``.

Delivery: a producer is idempotent with acks=all; ``send`` returns once the record is queued and
gives a future that is done when the broker has acknowledged it. Nothing may be acknowledged
upstream before that future is done.

Commit: a consumer never commits by itself. ``done(record)`` marks one record as finished, in any
order; ``commit()`` commits, per partition, the offset below which everything is done (the low
watermark). What was fetched and not done is read again after a crash or a rebalance, and says so:
``Record.deliveries`` is higher each time.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from google.protobuf.message import Message

from rollstream.topics import Topic


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One record as read: ``topic`` is the contract's name (without the run's prefix).

    ``deliveries``: how often at most it was handed to a member of the group before; 0 is certain,
    and it rises with each time. Always 0 for a consumer without a group.
    """

    topic: str
    partition: int
    offset: int
    key: bytes
    value: bytes
    headers: tuple[tuple[str, bytes], ...]
    timestamp_ms: int
    deliveries: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a consumer stands in one partition: next offset to read, committed offset, end of the
    log.
    """

    topic: str
    partition: int
    position: int
    committed: int
    end: int

    @property
    def lag_records(self) -> int:
        return max(0, self.end - self.committed)


class Producer(ABC):
    """Sends events.

    ``key`` is the record key; headers carry the trace context of the caller's span.
    """

    @abstractmethod
    async def start(self) -> None: ...

    @abstractmethod
    async def send(
        self, topic: Topic, message: Message, *, key: str, partition: int | None = None
    ) -> asyncio.Future[object]:
        """Queue one event (claim-checked if it is large). The future raises ``InfraError`` when the
        retry budget is spent.

        Waits while the producer's buffer is full: that is the back-pressure.
        """

    @abstractmethod
    async def send_batch(self, topic: Topic, events: Sequence[tuple[str, Message]]) -> None:
        """Send ``(key, message)`` pairs and return when all are acknowledged."""

    @abstractmethod
    async def stop(self) -> None:
        """Flush and close."""


class Consumer(ABC):
    """Reads events of one or more topics, as a member of a group or with partitions it assigns
    itself.
    """

    @abstractmethod
    async def start(self) -> None: ...

    @abstractmethod
    async def poll(self, *, max_records: int = 500, timeout_s: float = 0.5) -> list[Record]:
        """The next records in partition order, or an empty list after ``timeout_s``."""

    @abstractmethod
    def done(self, record: Record) -> None:
        """Mark a record as finished. A record of a partition that was lost meanwhile is ignored."""

    @abstractmethod
    async def begin_alone(self, record: Record) -> int | None:
        """Before a record that may have killed its owners is handled, and nothing else meanwhile:
        write that down. Returns how often that was done before; each of them died of it. None: the
        partition is lost, and the record comes again elsewhere.
        """

    @abstractmethod
    async def commit(self) -> None:
        """Commit the low watermark of each assigned partition that has moved."""

    @abstractmethod
    def seek(self, topic: Topic, partition: int, offset: int) -> None:
        """Read ``partition`` from ``offset`` on (self-assigned consumers)."""

    @abstractmethod
    async def positions(self) -> list[Position]:
        """One entry per assigned partition."""

    @abstractmethod
    def assignment(self) -> frozenset[tuple[str, int]]:
        """The assigned (topic, partition) pairs."""

    @abstractmethod
    async def stop(self) -> None: ...


class Bus(ABC):
    """Makes producers and consumers, and owns topic administration."""

    @abstractmethod
    def producer(self, *, client_id: str) -> Producer: ...

    @abstractmethod
    def consumer(
        self,
        topics: Sequence[Topic],
        *,
        client_id: str,
        group_id: str | None = None,
        from_end: bool = False,
    ) -> Consumer:
        """A consumer. With ``group_id`` it shares the partitions; without, it reads all of them and
        commits nothing.

        A group that has committed nothing starts at the beginning, or at the end with ``from_end``.
        """

    @abstractmethod
    def decode(self, record: Record) -> Message:
        """The event of a record, fetched from the blob store when it travels by reference.

        Raises:
            ContractError: the record is not a sound event of its topic.
            InfraError: the blob store cannot be read.
        """

    @abstractmethod
    async def ensure_topics(self, topics: Sequence[Topic]) -> list[str]:
        """Create what is missing and repair what can be repaired without losing an event.

        Returns what was found different, in words. ``ConfigError`` when a topic exists with other
        partitions, fewer replicas or another clean-up.
        """

    @abstractmethod
    async def partitions(self, topic: Topic) -> int: ...

    @abstractmethod
    async def end_offsets(self, topic: Topic) -> Mapping[int, int]: ...

    @abstractmethod
    async def committed(self, group_id: str, topic: Topic) -> Mapping[int, int]:
        """The offsets that a group has committed, by partition; none where it has not yet."""

    @abstractmethod
    async def cluster_id(self) -> str:
        """The id of the broker's log: a fresh broker has another one."""
