"""Records worked through together: what they change, and the order in which it becomes durable.

A crash may cut the order anywhere. Records that come again find either nothing of themselves, and
cause the same events under the same ids, or their group, and then all that they caused is on the
broker and only the statistic may lack them.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Generic, TypeVar

import structlog

from processors.pipeline import Emission
from rollstream.bus.kafka import settle
from rollstream.errors import ContractError, InfraError

log = structlog.get_logger(__name__)

# Of a handler that crashes on a record.
_TRIES = 3

# The partition that a change belongs to, and the value; None removes the key.
Change = tuple[int, bytes | None]
Event = TypeVar("Event")


class WriteBack(MutableMapping[bytes, bytes]):
    """A table with changes that are not in it yet; ``partition`` is that of the record in hand.

    Reads see the changes. What is accepted is written once per key, however often it changed.
    """

    def __init__(self, base: Mapping[bytes, bytes]) -> None:
        self._base = base
        self._accepted: dict[bytes, Change] = {}
        self._pending: dict[bytes, Change] = {}
        self.partition = 0

    def __getitem__(self, key: bytes) -> bytes:
        change = self._pending.get(key) or self._accepted.get(key)
        value = self._base.get(key) if change is None else change[1]
        # A Faust table gives empty bytes for what it does not have.
        if not value:
            raise KeyError(key)
        return value

    def __setitem__(self, key: bytes, value: bytes) -> None:
        self._pending[key] = (self.partition, value)

    def __delitem__(self, key: bytes) -> None:
        if key not in self:
            raise KeyError(key)
        self._pending[key] = (self.partition, None)

    def __iter__(self) -> Iterator[bytes]:
        changes = self._accepted | self._pending
        yield from (key for key in self._base if key not in changes)
        yield from (key for key, (_, value) in changes.items() if value is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def accept(self) -> None:
        """The record in hand is done."""
        self._accepted |= self._pending
        self._pending.clear()

    def rollback(self) -> None:
        """Forget what the record in hand has changed."""
        self._pending.clear()

    def take(self) -> dict[bytes, Change]:
        """What was accepted, to be written now; the caller writes it or ends."""
        changes, self._accepted = self._accepted, {}
        return changes


class Batch(ABC, Generic[Event]):
    """The effects of a batch, and their order. ``tables``: groups, then statistics."""

    tables: Sequence[WriteBack]

    @abstractmethod
    def partition(self, event: Event) -> int: ...

    @abstractmethod
    def apply(self, event: Event) -> list[Emission]:
        """What one record causes; it may change the tables."""

    @abstractmethod
    async def bury(self, event: Event, error: Exception) -> None:
        """Make a record that cannot be handled a dead letter."""

    @abstractmethod
    async def send(self, emission: Emission) -> asyncio.Future[object]:
        """Queue an event; what is returned is done when the broker has it."""

    @abstractmethod
    async def write(self, table: int, changes: Mapping[bytes, Change]) -> None:
        """Write changes; returns when the changelog has them."""

    @abstractmethod
    async def acknowledge(self, event: Event) -> None: ...

    async def handle(self, event: Event) -> list[Emission]:
        """What one record causes; one that cannot be handled becomes a dead letter, the rest goes
        on.
        """
        for table in self.tables:
            table.partition = self.partition(event)
        for tries in range(1, _TRIES + 1):
            try:
                emissions = self.apply(event)
            except InfraError:
                raise
            except Exception as error:
                for table in self.tables:
                    table.rollback()
                if isinstance(error, ContractError) or tries == _TRIES:
                    await self.bury(event, error)
                    break
                log.exception("handler crashed", tries=tries)
            else:
                for table in self.tables:
                    table.accept()
                return emissions
        return []

    async def work_through(self, events: Sequence[Event]) -> None:
        """Events, then groups, then statistics, then the acknowledgement."""
        deliveries = [
            await self.send(emission) for event in events for emission in await self.handle(event)
        ]
        await settle(deliveries)
        for number, table in enumerate(self.tables):
            await self.write(number, table.take())
        for event in events:
            await self.acknowledge(event)
