"""The bus over Apache Kafka with aiokafka.

Producer: idempotent, acks=all, so that a retry inside the client never doubles a record. Consumer:
commits only low watermarks; after a rebalance the watermarks of lost partitions are forgotten,
their records come again elsewhere. Every wait is bounded by ``bus.retry_budget_s``; when it is
spent the error is an ``InfraError`` that names the servers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import stamina
import structlog
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRebalanceListener, TopicPartition
from aiokafka.errors import IllegalStateError, KafkaConnectionError, KafkaError
from aiokafka.structs import OffsetAndMetadata
from google.protobuf.message import Message

from rollstream import codecs, telemetry
from rollstream.blobs import BlobStore
from rollstream.bus import admin
from rollstream.bus.base import Bus, Consumer, Position, Producer, Record
from rollstream.bus.claim import ClaimCheck
from rollstream.bus.marks import Marks
from rollstream.bus.security import check_refused, client_settings
from rollstream.config import Config
from rollstream.config.model import BusConfig
from rollstream.errors import InfraError
from rollstream.topics import BY_NAME, Topic

log = structlog.get_logger(__name__)
T = TypeVar("T")


async def within_budget(bus: BusConfig, what: str, action: Callable[[], Awaitable[T]]) -> T:
    """Run ``action``, again and again while Kafka refuses, until the retry budget is spent."""
    try:
        async for attempt in stamina.retry_context(
            on=(KafkaError, OSError, TimeoutError),
            attempts=None,
            timeout=bus.retry_budget_s,
            wait_initial=0.2,
            wait_max=2.0,
        ):
            with attempt:
                try:
                    return await action()
                except KafkaConnectionError:
                    await check_refused(bus)
                    raise
    except (KafkaError, OSError, TimeoutError) as error:
        raise InfraError(
            f"{what}: Kafka at {bus.bootstrap_servers} failed for {bus.retry_budget_s:.0f} s:"
            f" {error!r}",
            hint=f"is the broker up, and does it speak {bus.security.protocol}"
            " (bus.security.protocol)? `rollstream doctor` and its log tell more",
        ) from error
    raise AssertionError("stamina ends by returning or raising")


class KafkaProducer(Producer):
    def __init__(self, bus: KafkaBus, *, client_id: str) -> None:
        self._bus = bus
        config = bus.config.bus
        # aiokafka delivers for `request_timeout_ms` per batch and then fails it; idempotence needs
        # no limit on retries.
        self._client_factory = lambda: AIOKafkaProducer(
            **{**client_settings(config), "request_timeout_ms": int(config.retry_budget_s * 1000)},
            client_id=client_id,
            enable_idempotence=True,
            acks="all",
            compression_type=None if config.compression == "none" else config.compression,
            linger_ms=config.linger_ms,
            max_batch_size=config.batch_bytes,
            max_request_size=config.max_message_bytes,
        )
        self._client: AIOKafkaProducer | None = None

    async def start(self) -> None:
        async def connect() -> AIOKafkaProducer:
            client = self._client_factory()
            try:
                await client.start()
            except BaseException:
                await client.stop()
                raise
            return client

        self._client = await within_budget(self._bus.config.bus, "producer", connect)

    async def send(
        self, topic: Topic, message: Message, *, key: str, partition: int | None = None
    ) -> asyncio.Future[object]:
        value, headers = self._bus.claim.check_in(codecs.encode(message))
        return await self._send(topic, key, value, [*telemetry.inject(), *headers], partition)

    async def send_batch(self, topic: Topic, events: Sequence[tuple[str, Message]]) -> None:
        trace = telemetry.inject()
        futures = []
        for key, message in events:
            value, headers = self._bus.claim.check_in(codecs.encode(message))
            futures.append(await self._send(topic, key, value, [*trace, *headers], None))
        await settle(futures)

    async def _send(
        self,
        topic: Topic,
        key: str,
        value: bytes,
        headers: list[tuple[str, bytes]],
        partition: int | None,
    ) -> asyncio.Future[object]:
        assert self._client is not None, "start() first"
        try:
            future: asyncio.Future[object] = await self._client.send(
                self._bus.full_name(topic),
                value,
                key=key.encode(),
                headers=headers,
                partition=partition,
            )
        except (KafkaError, OSError) as error:
            raise _refused(self._bus.config.bus, topic, error) from error
        return future

    async def stop(self) -> None:
        if self._client is not None:
            await self._client.stop()
            self._client = None


async def settle(futures: Sequence[asyncio.Future[object]]) -> None:
    """Wait until all deliveries are acknowledged; ``InfraError`` when one was not."""
    try:
        for future in futures:
            await future
    except (KafkaError, OSError) as error:
        raise InfraError(
            f"an event was not acknowledged: {error!r}", hint="is the broker up?"
        ) from error


def _refused(bus: BusConfig, topic: Topic, error: Exception) -> InfraError:
    return InfraError(
        f"{topic.name}: Kafka at {bus.bootstrap_servers} refused a record: {error!r}",
        hint="is the broker up, and do its topics exist?",
    )


class _Rebalance(ConsumerRebalanceListener):
    def __init__(self, consumer: KafkaConsumer) -> None:
        self._consumer = consumer

    async def on_partitions_revoked(self, revoked: set[TopicPartition]) -> None:
        await self._consumer.revoked(revoked)

    async def on_partitions_assigned(self, assigned: set[TopicPartition]) -> None:
        log.debug("assigned", partitions=sorted(map(str, assigned)))


class KafkaConsumer(Consumer):
    def __init__(
        self,
        bus: KafkaBus,
        topics: Sequence[Topic],
        *,
        client_id: str,
        group_id: str | None,
        from_end: bool,
    ) -> None:
        self._bus = bus
        self._topics = {bus.full_name(topic): topic for topic in topics}
        self._group_id = group_id
        self._marks = Marks()
        config = bus.config.bus
        self._client_factory = lambda: AIOKafkaConsumer(
            **client_settings(config),
            client_id=client_id,
            group_id=group_id,
            enable_auto_commit=False,
            auto_offset_reset="latest" if from_end else "earliest",
            session_timeout_ms=int(config.session_timeout_s * 1000),
            heartbeat_interval_ms=int(config.session_timeout_s * 1000 / 5),
            # A batch of long rollouts may hold the loop between polls; liveness is the heartbeat's
            # matter.
            max_poll_interval_ms=3_600_000,
            max_partition_fetch_bytes=config.fetch_bytes,
            isolation_level="read_committed",
            # Each value has a digest of its own (``claim.py``).
            check_crcs=False,
        )
        self._client: AIOKafkaConsumer | None = None

    async def start(self) -> None:
        self._client = await within_budget(self._bus.config.bus, "consumer", self._connect)

    async def _connect(self) -> AIOKafkaConsumer:
        client = self._client_factory()
        try:
            await client.start()
            if self._group_id is None:
                client.assign(
                    [
                        TopicPartition(name, partition)
                        for name, topic in self._topics.items()
                        for partition in range(await self._bus.partitions(topic))
                    ]
                )
            else:
                client.subscribe(list(self._topics), listener=_Rebalance(self))
        except BaseException:
            await client.stop()
            raise
        return client

    async def poll(self, *, max_records: int = 500, timeout_s: float = 0.5) -> list[Record]:
        assert self._client is not None, "start() first"
        try:
            batches = await self._client.getmany(
                timeout_ms=int(timeout_s * 1000), max_records=max_records
            )
        except (KafkaError, OSError) as error:
            raise InfraError(
                f"reading {', '.join(self._topics)} failed: {error!r}", hint="is the broker up?"
            ) from error
        for partition, messages in batches.items():
            if partition not in self._marks:
                await self._begin(partition, messages[0].offset)
        records = []
        for partition, messages in batches.items():
            if partition not in self._marks:
                continue  # refused, or lost meanwhile: it comes again, here or elsewhere
            name = self._topics[partition.topic].name
            for message in messages:
                deliveries = self._marks.fetched(partition, message.offset)
                records.append(
                    Record(
                        topic=name,
                        partition=message.partition,
                        offset=message.offset,
                        key=message.key or b"",
                        value=message.value or b"",
                        headers=tuple(message.headers),
                        timestamp_ms=message.timestamp,
                        deliveries=deliveries,
                    )
                )
        return records

    async def _begin(self, partition: TopicPartition, start: int) -> None:
        """Begin with a partition; in a group it is claimed first. When that is refused, what was
        fetched of it is not handed out.
        """
        assert self._client is not None
        if self._group_id is None:
            self._marks.begin(partition, start)
            return
        try:
            ends = await self._client.end_offsets([partition])
            metadata = await self._bus.commit_metadata(self._group_id, partition)
            claim = self._marks.claim(
                partition, start=start, end=ends[partition], metadata=metadata
            )
            await self._client.commit({partition: OffsetAndMetadata(start, claim)})
        except (KafkaError, IllegalStateError, OSError, TimeoutError) as error:
            log.warning("claim refused", partition=str(partition), error=repr(error))
            self._marks.forget([partition])
            if partition in self._client.assignment():
                self._client.seek(partition, start)
        else:
            self._marks.committed({partition: (start, claim)})

    def done(self, record: Record) -> None:
        partition = TopicPartition(self._bus.prefixed(record.topic), record.partition)
        self._marks.done(partition, record.offset)

    async def begin_alone(self, record: Record) -> int | None:
        partition = TopicPartition(self._bus.prefixed(record.topic), record.partition)
        begun = self._marks.begin_alone(partition, record.offset)
        if begun is None:
            return None
        before, at = begun
        return before if await self._commit({partition: at}) else None

    async def commit(self) -> None:
        if self._client is not None and self._group_id is not None:
            await self._commit(self._marks.moved(self._client.assignment()))

    async def _commit(self, offsets: Mapping[TopicPartition, tuple[int, str]]) -> bool:
        assert self._client is not None, "start() first"
        if not offsets:
            return True
        try:
            await self._client.commit({p: OffsetAndMetadata(*at) for p, at in offsets.items()})
        except (KafkaError, IllegalStateError) as error:
            # A rebalance took the partition: the records come again at its new owner, with the same
            # ids.
            log.warning("commit refused", error=repr(error))
            return False
        self._marks.committed(offsets)
        return True

    async def revoked(self, partitions: set[TopicPartition]) -> None:
        """Commit what is finished, then forget: what is not finished is read again by the new
        owner.
        """
        await self.commit()
        self._marks.forget(partitions)

    def seek(self, topic: Topic, partition: int, offset: int) -> None:
        assert self._client is not None, "start() first"
        at = TopicPartition(self._bus.full_name(topic), partition)
        self._client.seek(at, offset)
        self._marks.forget([at])

    async def positions(self) -> list[Position]:
        assert self._client is not None, "start() first"
        assigned = list(self._client.assignment())
        if not assigned:
            return []
        try:
            ends = await self._client.end_offsets(assigned)
        except (KafkaError, OSError) as error:
            raise InfraError(
                f"the ends of {', '.join(self._topics)} are not known: {error!r}",
                hint="is the broker up?",
            ) from error
        found = []
        for partition in assigned:
            position = await self._client.position(partition)
            # Before the first record of this life, what the group has committed is where it stands.
            done = self._marks.position(partition)
            committed = position if done is None else done
            found.append(
                Position(
                    topic=self._topics[partition.topic].name,
                    partition=partition.partition,
                    position=position,
                    committed=committed,
                    end=ends[partition],
                )
            )
        return found

    def assignment(self) -> frozenset[tuple[str, int]]:
        assert self._client is not None, "start() first"
        return frozenset(
            (self._topics[p.topic].name, p.partition) for p in self._client.assignment()
        )

    async def stop(self) -> None:
        if self._client is not None:
            await self.commit()
            await self._client.stop()
            self._client = None


class KafkaBus(Bus):
    """The topics of one run on one Kafka."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.claim = ClaimCheck(
            BlobStore(config.blob_uri), max_inline_bytes=config.bus.max_inline_bytes
        )

    def full_name(self, topic: Topic) -> str:
        """The topic's name on the broker."""
        return self.prefixed(topic.name)

    def prefixed(self, name: str) -> str:
        return self.config.bus.topic_prefix + name

    def decode(self, record: Record) -> Message:
        value = self.claim.redeem(record.value, record.headers)
        return codecs.decode(BY_NAME[record.topic], value)

    def producer(self, *, client_id: str) -> KafkaProducer:
        return KafkaProducer(self, client_id=client_id)

    def consumer(
        self,
        topics: Sequence[Topic],
        *,
        client_id: str,
        group_id: str | None = None,
        from_end: bool = False,
    ) -> KafkaConsumer:
        if group_id is not None:
            group_id = self.config.bus.topic_prefix + group_id
        return KafkaConsumer(
            self, topics, client_id=client_id, group_id=group_id, from_end=from_end
        )

    async def ensure_topics(self, topics: Sequence[Topic]) -> list[str]:
        return await within_budget(self.config.bus, "topics", lambda: admin.ensure(self, topics))

    async def partitions(self, topic: Topic) -> int:
        return await within_budget(
            self.config.bus, "partitions", lambda: admin.partition_count(self, topic)
        )

    async def end_offsets(self, topic: Topic) -> Mapping[int, int]:
        client = AIOKafkaConsumer(**client_settings(self.config.bus))
        try:
            await within_budget(self.config.bus, "end offsets", client.start)
            count = await self.partitions(topic)
            asked = [TopicPartition(self.full_name(topic), p) for p in range(count)]
            ends = await within_budget(
                self.config.bus, "end offsets", lambda: client.end_offsets(asked)
            )
            return {partition.partition: end for partition, end in ends.items()}
        finally:
            await client.stop()

    async def committed(self, group_id: str, topic: Topic) -> Mapping[int, int]:
        name = self.prefixed(group_id)
        return await within_budget(
            self.config.bus, "committed offsets", lambda: admin.committed(self, name, topic)
        )

    async def commit_metadata(self, group: str, partition: TopicPartition) -> str | None:
        """What was committed beside a group's offset; ``group`` is the full name."""
        return await admin.commit_metadata(self, group, partition)

    async def cluster_id(self) -> str:
        return await within_budget(self.config.bus, "cluster id", lambda: admin.cluster_id(self))
