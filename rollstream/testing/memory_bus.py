"""The bus in one process: the twin of ``KafkaBus`` over a ``MemoryBroker``.

Clients speak to the broker by requests that take time and may be lost, in either direction, as a
``Network`` says; the default one is perfect. A request is repeated until its answer comes or
``bus.retry_budget_s`` is spent (``InfraError``). On an event loop of virtual time with a seeded
network this is what ``tests/simulation`` runs the services on.

| task | waits for | unblocked by |
|---|---|---|
| ``lane`` of a producer, one per partition | acknowledgement of the batch before | the broker |
| ``member`` of a consumer in a group | a heartbeat interval; the others to let go | time; they |
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import structlog
from google.protobuf.message import Message

from rollstream import codecs, telemetry
from rollstream.blobs import BlobStore
from rollstream.bus.base import Bus, Consumer, Position, Producer, Record
from rollstream.bus.claim import ClaimCheck
from rollstream.bus.marks import Marks, Partition
from rollstream.config import Config
from rollstream.errors import InfraError
from rollstream.testing.memory_broker import MemoryBroker
from rollstream.topics import BY_NAME, Topic

log = structlog.get_logger(__name__)
T = TypeVar("T")

# Records that a producer holds unacknowledged before ``send`` waits.
_MAX_UNACKNOWLEDGED = 1000
# Between two looks whether the others have let go of their partitions.
_SHARE_EVERY_S = 0.05
_TOPIC_EVERY_S = 0.2


class Network:
    """The ways between clients and broker. This one is perfect; tests make worse ones."""

    def request_s(self, client: str) -> float | None:
        """How long a request takes to the broker; None: it is lost."""
        return 0.0

    def response_s(self, client: str) -> float | None:
        """How long its answer takes back; None: it is lost."""
        return 0.0

    def batch(self, waiting: int) -> int:
        """How many of the records that wait (at least 1) go together."""
        return waiting


class MemoryBus(Bus):
    """The topics of one run on one ``MemoryBroker``."""

    def __init__(
        self, config: Config, broker: MemoryBroker, *, network: Network | None = None
    ) -> None:
        self.config = config
        self.broker = broker
        self.network = network or Network()
        self._claim = ClaimCheck(
            BlobStore(config.blob_uri), max_inline_bytes=config.bus.max_inline_bytes
        )

    def prefixed(self, name: str) -> str:
        return self.config.bus.topic_prefix + name

    def full_name(self, topic: Topic) -> str:
        return self.prefixed(topic.name)

    def producer(self, *, client_id: str) -> MemoryProducer:
        return MemoryProducer(self, client_id=client_id)

    def consumer(
        self,
        topics: Sequence[Topic],
        *,
        client_id: str,
        group_id: str | None = None,
        from_end: bool = False,
    ) -> MemoryConsumer:
        return MemoryConsumer(
            self,
            topics,
            client_id=client_id,
            group_id=None if group_id is None else self.prefixed(group_id),
            from_end=from_end,
        )

    def decode(self, record: Record) -> Message:
        value = self._claim.redeem(record.value, record.headers)
        return codecs.decode(BY_NAME[record.topic], value)

    def packed(self, message: Message) -> tuple[bytes, tuple[tuple[str, bytes], ...]]:
        """Value and headers of an event."""
        value, headers = self._claim.check_in(codecs.encode(message))
        return value, (*telemetry.inject(), *headers)

    async def ensure_topics(self, topics: Sequence[Topic]) -> list[str]:
        def make() -> None:
            for topic in topics:
                count = topic.partitions or self.config.bus.partitions
                self.broker.ensure(self.full_name(topic), topic, count)

        await self.call("admin", make)
        return []

    async def partitions(self, topic: Topic) -> int:
        name, loop = self.full_name(topic), asyncio.get_running_loop()
        deadline = loop.time() + self.config.bus.retry_budget_s
        while not (count := await self.call("admin", lambda: self.broker.partitions(name))):
            if loop.time() >= deadline:
                raise self._gave_up(f"topic {name} does not exist")
            await asyncio.sleep(_TOPIC_EVERY_S)
        return count

    async def end_offsets(self, topic: Topic) -> Mapping[int, int]:
        name, count = self.full_name(topic), await self.partitions(topic)
        return await self.call(
            "admin", lambda: {p: self.broker.end((name, p)) for p in range(count)}
        )

    async def committed(self, group_id: str, topic: Topic) -> Mapping[int, int]:
        name = self.full_name(topic)
        group = await self.call("admin", lambda: self.broker.group(self.prefixed(group_id)))
        return {p: at for (of, p), (at, _) in group.offsets.items() if of == name}

    async def cluster_id(self) -> str:
        return await self.call("admin", lambda: self.broker.cluster_id)

    async def call(self, client: str, action: Callable[[], T]) -> T:
        """Have the broker do ``action``, once or more often, until its answer comes.

        Raises:
            InfraError: none came within the retry budget.
        """
        loop, bus = asyncio.get_running_loop(), self.config.bus
        deadline = loop.time() + bus.retry_budget_s
        while (left_s := deadline - loop.time()) > 0:
            answer: asyncio.Future[T] = loop.create_future()
            if (delay := self.network.request_s(client)) is not None:
                self._later(delay, partial(self._arrive, client, action, answer))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, bus.request_timeout_s)):
                    return await answer
        raise self._gave_up("no answer")

    def _arrive(self, client: str, action: Callable[[], T], answer: asyncio.Future[T]) -> None:
        """A request is at the broker, whether or not someone still waits for its answer."""
        reply: Callable[[], None]
        try:
            reply = partial(_answer, answer, action())
        except Exception as error:  # noqa: BLE001 - the asker's to handle
            reply = partial(_refuse, answer, error)
        if (delay := self.network.response_s(client)) is not None:
            self._later(delay, reply)

    def _later(self, delay_s: float, work: Callable[[], None]) -> None:
        loop, context = asyncio.get_running_loop(), self.broker.context
        if delay_s:
            loop.call_later(delay_s, work, context=context)
        else:
            loop.call_soon(work, context=context)

    def _gave_up(self, what: str) -> InfraError:
        return InfraError(
            f"{what} for {self.config.bus.retry_budget_s:.0f} s: broker {self.broker.cluster_id}",
            hint="is the broker up?",
        )


def _answer(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _refuse(future: asyncio.Future[T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


class _Lane:
    """What a producer sends to one partition, in order."""

    def __init__(self, name: str, partition: int) -> None:
        self.name, self.partition = name, partition
        self.waiting: deque[tuple[Record, asyncio.Future[object]]] = deque()
        self.sent = 0
        self.task: asyncio.Task[None] | None = None


class MemoryProducer(Producer):
    def __init__(self, bus: MemoryBus, *, client_id: str) -> None:
        self._bus = bus
        self._client = bus.broker.new_client(client_id)
        self._lanes: dict[Partition, _Lane] = {}
        self._open: set[asyncio.Future[object]] = set()
        self._counts: dict[str, int] = {}

    async def start(self) -> None:
        await self._bus.call(self._client, lambda: None)

    async def send(
        self, topic: Topic, message: Message, *, key: str, partition: int | None = None
    ) -> asyncio.Future[object]:
        value, headers = self._bus.packed(message)
        return await self.send_bytes(topic, key.encode(), value, headers, partition)

    async def send_bytes(
        self,
        topic: Topic,
        key: bytes,
        value: bytes,
        headers: tuple[tuple[str, bytes], ...] = (),
        partition: int | None = None,
    ) -> asyncio.Future[object]:
        """Queue bytes that are no event of ours."""
        while len(self._open) >= _MAX_UNACKNOWLEDGED:
            await asyncio.wait(self._open, return_when=asyncio.FIRST_COMPLETED)
        name = self._bus.full_name(topic)
        if name not in self._counts:
            self._counts[name] = await self._bus.partitions(topic)
        if partition is None:
            partition = self._bus.broker.partition_of(name, key)
        record = Record(
            topic=topic.name,
            partition=partition,
            offset=-1,
            key=key,
            value=value,
            headers=headers,
            timestamp_ms=int(time.time() * 1000),
        )
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._open.add(future)
        future.add_done_callback(self._closed)
        lane = self._lanes.setdefault((name, partition), _Lane(name, partition))
        lane.waiting.append((record, future))
        if lane.task is None or lane.task.done():
            lane.task = asyncio.create_task(self._empty(lane), name=f"lane-{name}-{partition}")
        return future

    def _closed(self, future: asyncio.Future[object]) -> None:
        self._open.discard(future)
        if not future.cancelled():
            future.exception()  # whoever waits for it gets it as well

    async def send_batch(self, topic: Topic, events: Sequence[tuple[str, Message]]) -> None:
        futures = [await self.send(topic, message, key=key) for key, message in events]
        for future in futures:
            await future

    async def _empty(self, lane: _Lane) -> None:
        while lane.waiting:
            count = self._bus.network.batch(len(lane.waiting))
            batch = [lane.waiting.popleft() for _ in range(count)]
            records = [record for record, _ in batch]
            first, lane.sent = lane.sent, lane.sent + count
            error: InfraError | None = None
            try:
                await self._bus.call(
                    self._client,
                    partial(
                        self._bus.broker.produce,
                        self._client,
                        lane.name,
                        lane.partition,
                        first,
                        records,
                    ),
                )
            except InfraError as refused:
                error = refused
            for _, future in batch:
                if future.cancelled():
                    continue
                if error is None:
                    future.set_result(None)
                else:
                    future.set_exception(error)

    async def stop(self) -> None:
        tasks = [lane.task for lane in self._lanes.values() if lane.task is not None]
        await asyncio.gather(*tasks)


class MemoryConsumer(Consumer):
    def __init__(
        self,
        bus: MemoryBus,
        topics: Sequence[Topic],
        *,
        client_id: str,
        group_id: str | None,
        from_end: bool,
    ) -> None:
        self._bus = bus
        self._topics = {bus.full_name(topic): topic for topic in topics}
        self._group = group_id
        self._from_end = from_end
        self._client = bus.broker.new_client(client_id)
        self._marks = Marks()
        # The next offset to read, of each assigned partition.
        self._next: dict[Partition, int] = {}
        self._member: asyncio.Task[None] | None = None
        # Of the group; rises with each share of partitions.
        self.generation = -1
        # Rises with each change of what is read: what was fetched before is not handed out.
        self._epoch = 0
        self._watched = False

    async def start(self) -> None:
        if self._group is not None:
            self._member = asyncio.create_task(self._membership(), name=f"member-{self._client}")
            return
        for name, topic in self._topics.items():
            count = await self._bus.partitions(topic)
            self._next.update(await self._starts([(name, p) for p in range(count)]))

    async def _starts(self, partitions: Sequence[Partition]) -> dict[Partition, int]:
        """Where the group stands; where it has not begun, the beginning or the end."""
        broker = self._bus.broker

        def starts() -> dict[Partition, int]:
            offsets = broker.group(self._group).offsets if self._group is not None else {}
            return {
                p: offsets[p][0] if p in offsets else broker.end(p) if self._from_end else 0
                for p in partitions
            }

        return await self._bus.call(self._client, starts)

    async def poll(self, *, max_records: int = 500, timeout_s: float = 0.5) -> list[Record]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            records = await self._fetch(max_records)
            left_s = deadline - loop.time()
            if records or left_s <= 0:
                return records
            woken: asyncio.Future[None] = loop.create_future()
            timer = loop.call_later(left_s, _answer, woken, None)
            wake = partial(_answer, woken, None)
            self._bus.broker.when_appended(self._topics, wake)
            try:
                await woken
            finally:
                timer.cancel()
                self._bus.broker.forget(self._topics, wake)

    async def _fetch(self, max_records: int) -> list[Record]:
        epoch = self._epoch
        if not self._next:
            return []
        positions = dict(self._next)
        batches = await self._bus.call(
            self._client, lambda: self._bus.broker.fetch(positions, max_records)
        )
        for rows in batches:
            at = (self._bus.prefixed(rows[0].topic), rows[0].partition)
            if epoch == self._epoch and at not in self._marks:
                await self._begin(at, rows[0].offset)
        if epoch != self._epoch:
            return []
        return [row for rows in batches for row in self._hand_out(rows)]

    def _hand_out(self, rows: Sequence[Record]) -> list[Record]:
        at = (self._bus.prefixed(rows[0].topic), rows[0].partition)
        if at not in self._marks:
            return []
        self._next[at] = rows[-1].offset + 1
        records = []
        for row in rows:
            deliveries = self._marks.fetched(at, row.offset)
            records.append(replace(row, deliveries=deliveries) if deliveries else row)
        return records

    async def _begin(self, at: Partition, start: int) -> None:
        """Begin with a partition; in a group it is claimed first."""
        if self._group is None:
            self._marks.begin(at, start)
            return
        epoch, group, generation = self._epoch, self._group, self.generation
        broker = self._bus.broker
        end, metadata = await self._bus.call(
            self._client,
            lambda: (broker.end(at), broker.group(group).offsets.get(at, (0, None))[1]),
        )
        if epoch != self._epoch:
            return
        claim = self._marks.claim(at, start=start, end=end, metadata=metadata)
        offsets = {at: (start, claim)}
        taken = await self._bus.call(
            self._client, lambda: broker.commit(group, self._client, generation, offsets)
        )
        if epoch != self._epoch:
            return
        if taken:
            self._marks.committed(offsets)
        else:
            self._marks.forget([at])

    def done(self, record: Record) -> None:
        self._marks.done((self._bus.prefixed(record.topic), record.partition), record.offset)

    async def begin_alone(self, record: Record) -> int | None:
        at = (self._bus.prefixed(record.topic), record.partition)
        begun = self._marks.begin_alone(at, record.offset)
        if begun is None:
            return None
        before, mark = begun
        return before if await self._commit({at: mark}) else None

    async def commit(self) -> None:
        await self._commit(self._marks.moved(list(self._next)))

    async def _commit(self, offsets: Mapping[Partition, tuple[int, str]]) -> bool:
        group, generation = self._group, self.generation
        if group is None or not offsets:
            return True
        taken = await self._bus.call(
            self._client,
            lambda: self._bus.broker.commit(group, self._client, generation, offsets),
        )
        if taken and generation == self.generation:
            self._marks.committed(offsets)
        elif not taken:
            log.warning("commit refused", client=self._client)
        return taken

    def seek(self, topic: Topic, partition: int, offset: int) -> None:
        at = (self._bus.full_name(topic), partition)
        self._next[at] = offset
        self._marks.forget([at])
        self._epoch += 1

    async def positions(self) -> list[Position]:
        assigned = list(self._next)
        ends = await self._bus.call(
            self._client, lambda: {at: self._bus.broker.end(at) for at in assigned}
        )
        found = []
        for at in assigned:
            position = self._next.get(at)
            if position is None:
                continue  # lost meanwhile
            done = self._marks.position(at)
            found.append(
                Position(
                    topic=self._topics[at[0]].name,
                    partition=at[1],
                    position=position,
                    committed=position if done is None else done,
                    end=ends[at],
                )
            )
        return found

    def assignment(self) -> frozenset[tuple[str, int]]:
        return frozenset((self._topics[name].name, p) for name, p in self._next)

    async def stop(self) -> None:
        if self._member is not None:
            self._member.cancel()
            await asyncio.gather(self._member, return_exceptions=True)
            self._member = None
            await self.commit()
            group = self._group
            assert group is not None
            await self._bus.call(self._client, lambda: self._bus.broker.leave(group, self._client))
        self._next.clear()

    # -- the group

    async def _membership(self) -> None:
        """Join, stay by heartbeats, and join again when partitions are to be shared anew."""
        assert self._group is not None
        group, loop = self._group, asyncio.get_running_loop()
        every_s = self._bus.config.bus.session_timeout_s / 5
        for topic in self._topics.values():
            await self._bus.partitions(topic)
        while True:
            try:
                stays = self.generation >= 0 and await self._bus.call(
                    self._client,
                    lambda: self._bus.broker.heartbeat(
                        group, self._client, self.generation, loop.time()
                    ),
                )
                if not stays:
                    await self._rejoin(group)
            except InfraError as error:
                log.warning("no answer from the group", error=str(error))
            await asyncio.sleep(every_s)

    async def _rejoin(self, group: str) -> None:
        """Commit what is finished and forget the rest: its new owner reads it again."""
        loop, broker = asyncio.get_running_loop(), self._bus.broker
        if self.generation >= 0:
            await self.commit()
        self._marks.forget(list(self._next))
        self._next.clear()
        self._epoch += 1

        def join() -> None:
            broker.join(group, self._client, tuple(self._topics), loop.time())
            self._watch(group)

        await self._bus.call(self._client, join)
        while True:
            try:
                share = await self._bus.call(
                    self._client, lambda: broker.share(group, self._client, loop.time())
                )
            except KeyError:
                return  # put out, or another came: the next heartbeat joins again
            if share is not None:
                break
            await asyncio.sleep(_SHARE_EVERY_S)
        generation, partitions = share
        starts = await self._starts(partitions)
        self.generation, self._next = generation, starts
        self._epoch += 1

    def _watch(self, group: str) -> None:
        """The broker's part: put this member out when its session has timed out."""
        if self._watched:
            return
        loop, broker = asyncio.get_running_loop(), self._bus.broker
        timeout_s, member = self._bus.config.bus.session_timeout_s, self._client

        def look() -> None:
            found = broker.group(group).members.get(member)
            self._watched = found is not None
            if found is None:
                return
            left_s = found.beat_at + timeout_s - loop.time()
            if left_s > 0:
                loop.call_later(left_s, look, context=broker.context)
                return
            broker.leave(group, member)
            self._watched = False

        self._watched = True
        loop.call_later(timeout_s, look, context=broker.context)
