"""The Faust app: the stream, the changelogged tables, and acknowledgement after delivery.

Faust is at-least-once here. Records are worked through in batches (``batch.py``: what becomes
durable in which order). Nothing is ever raised into Faust: there an exception acknowledges and
skips the record.

Time passes by records too: a tick on an internal topic, in the partition of its group, because a
table may only be written for a record of that partition.
"""

from __future__ import annotations

import asyncio
import struct
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import faust
import faust.streams
import structlog
from mode.utils.queues import FlowControlEvent

from processors.batch import Batch, Change, WriteBack
from processors.letters import APP, letter_of
from processors.pipeline import Emission, Origin, Pipeline
from rollstream.budget import ByteBudget
from rollstream.bus import Producer, Record
from rollstream.bus.deadletters import send_dead_letter
from rollstream.bus.kafka import KafkaBus
from rollstream.bus.security import ssl_context
from rollstream.config import Config
from rollstream.config.model import SecurityConfig
from rollstream.topics import TRAJECTORIES
from rollstream.v1 import events_pb2

log = structlog.get_logger(__name__)

TICKS = "processors-ticks"
# In the order in which they are written: see ``Batch``.
TABLES = ("groups", "normalisers")
_TICK = struct.Struct("<d")

Handler = Callable[[Any], list[Emission]]


def table_names(config: Config) -> list[str]:
    """The changelog topics that the tables need, as the broker knows them."""
    return [f"{config.bus.topic_prefix}{APP}-{table}-changelog" for table in TABLES]


class AwaitedTable(faust.Table[bytes, bytes]):
    """A table whose changelog deliveries can be waited for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.deliveries: list[Awaitable[Any]] = []

    def send_changelog(self, *args: Any, **kwargs: Any) -> Any:
        delivery = super().send_changelog(*args, **kwargs)
        self.deliveries.append(delivery)
        return delivery


class _Flow(FlowControlEvent):
    """Resumes without throwing away what has arrived.

    After each recovery Faust seeks to the committed offsets, resumes its streams and empties their
    queues. By then the fetcher, in a loop of its own, has begun to fill them again: those records
    were lost until the next restart (found by the kill test: 24 of 600 groups). What the queues
    still hold from before a rebalance is dropped by its generation.
    """

    def resume(self) -> None:
        self._suspend.clear()
        self._resume.set()


class _App(faust.App):
    @cached_property
    def flow_control(self) -> FlowControlEvent:
        return _Flow(loop=self.loop)


class ProcessorApp:
    """One life of the Faust app; ``faust.App`` cannot be started twice."""

    def __init__(self, config: Config, bus: KafkaBus, producer: Producer) -> None:
        self.config = config
        self.events_total = 0
        self.dead_letters_total = 0
        self._bus = bus
        self.producer = producer
        self.app = _make_app(config)
        raw = {"key_type": bytes, "value_type": bytes}
        raw_codec = {"key_serializer": "raw", "value_serializer": "raw"}
        self.tables: list[AwaitedTable] = [
            self.app.Table(name, default=bytes, partitions=config.bus.partitions, **raw)
            for name in TABLES
        ]
        self.changes = [WriteBack(table) for table in self.tables]
        groups, normalisers = self.changes
        self.pipeline = Pipeline(config, groups=groups, normalisers=normalisers)
        self.tables[0].on_recover(self._recovered)
        # Of trajectories and ticks: they change the same tables.
        self._arrived: asyncio.Queue[_Arrival] = asyncio.Queue(config.processors.batch_records)
        self._room = ByteBudget(config.processors.batch_bytes)
        source = self.app.topic(bus.full_name(TRAJECTORIES), **raw, **raw_codec)
        ticks = self.app.topic(config.bus.topic_prefix + TICKS, **raw, **raw_codec)
        self._ticks = ticks
        self.app.agent(source, name="score")(self._consume(self._trajectory))
        self.app.agent(ticks, name="ticks")(self._consume(self._tick))

    async def _recovered(self) -> None:
        """The tables are those of the partitions that this worker has now."""
        self.pipeline.recover(self.tables[0])

    def partitions(self) -> list[int]:
        """The partitions of ``trajectories`` that this worker has."""
        topic = self._bus.full_name(TRAJECTORIES)
        return [tp.partition for tp in self.app.consumer.assignment() if tp.topic == topic]

    async def send_ticks(self) -> None:
        """Send a tick to every group whose deadline has passed."""
        now_s = time.time()
        futures = []
        for key, partition in self.pipeline.due(now_s):
            futures.append(
                await self._ticks.send(key=key, value=_TICK.pack(now_s), partition=partition)
            )
        for future in futures:
            await future

    def _consume(self, handle: Handler) -> Callable[[Any], Awaitable[None]]:
        async def agent(stream: Any) -> None:
            async for event in stream.noack().events():
                await self._room.take(_size(event))
                await self._arrived.put(_Arrival(event, stream, handle))

        return agent

    async def run(self) -> None:
        """Work through what arrives, in batches of what has arrived meanwhile."""
        while True:
            batch = [await self._arrived.get()]
            while len(batch) < self.config.processors.batch_records and not self._arrived.empty():
                batch.append(self._arrived.get_nowait())
            generation = self.app.consumer_generation_id
            # The others were fetched before a rebalance and come again, perhaps elsewhere.
            current = [a for a in batch if a.event.message.generation_id == generation]
            await _FaustBatch(self).work_through(current)
            self.events_total += len(current)
            self._room.give(sum(_size(arrival.event) for arrival in batch))

    async def bury(self, event: Any, error: Exception) -> None:
        """Make a record that cannot be handled a dead letter."""
        record = _record(event, self.config)
        log.error("dead letter", topic=record.topic, offset=record.offset, error=str(error))
        letter = letter_of(record, error, run_id=self.config.run.id)
        await send_dead_letter(self.producer, letter)
        self.dead_letters_total += 1

    def _trajectory(self, event: Any) -> list[Emission]:
        trajectory = self._bus.decode(_record(event, self.config))
        assert isinstance(trajectory, events_pb2.Trajectory)
        origin = Origin(partition=event.message.partition, offset=event.message.offset)
        return self.pipeline.on_trajectory(trajectory, origin)

    def _tick(self, event: Any) -> list[Emission]:
        (now_s,) = _TICK.unpack(event.value)
        return self.pipeline.on_tick(event.key, now_s, partition=event.message.partition)


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A record, the stream that acknowledges it, and what is to be done with it."""

    event: Any
    stream: Any
    handle: Handler


class _FaustBatch(Batch[_Arrival]):
    """The effects of records in Faust."""

    def __init__(self, processor: ProcessorApp) -> None:
        self.tables = processor.changes
        self._processor = processor
        # The last record of each partition, in whose name Faust's tables are written.
        self._last: dict[int, Any] = {}

    def partition(self, arrival: _Arrival) -> int:
        return int(arrival.event.message.partition)

    def apply(self, arrival: _Arrival) -> list[Emission]:
        self._last[self.partition(arrival)] = arrival.event
        return arrival.handle(arrival.event)

    async def bury(self, arrival: _Arrival, error: Exception) -> None:
        await self._processor.bury(arrival.event, error)

    async def send(self, emission: Emission) -> asyncio.Future[object]:
        topic, key, message = emission
        return await self._processor.producer.send(topic, message, key=key)

    async def write(self, table: int, changes: Mapping[bytes, Change]) -> None:
        target = self._processor.tables[table]
        for key, (partition, value) in changes.items():
            # Faust takes the partition of a change from the record in hand, which in a batch it
            # does not know.
            faust.streams._current_event.set(weakref.ref(self._last[partition]))
            if value is None:
                target.pop(key, None)
            else:
                target[key] = value
        deliveries, target.deliveries = target.deliveries, []
        for delivery in deliveries:
            await delivery

    async def acknowledge(self, arrival: _Arrival) -> None:
        await arrival.stream.ack(arrival.event)


def _make_app(config: Config) -> Any:
    bus, settings = config.bus, config.processors
    store = "memory://" if settings.table_store == "memory" else "rocksdb://"
    return _App(
        f"{bus.topic_prefix}{APP}",
        broker=[f"kafka://{server}" for server in bus.bootstrap_servers.split(",")],
        broker_credentials=_credentials(bus.security),
        datadir=str(_made(config.run.dir / "faust")),
        store=store,
        Table=AwaitedTable,
        web_enabled=False,
        autodiscover=False,
        # Our own admin makes the topics, with the right settings, before the app starts.
        topic_allow_declare=False,
        topic_disable_leader=True,
        topic_partitions=bus.partitions,
        topic_replication_factor=bus.replication,
        consumer_auto_offset_reset="earliest",
        consumer_max_fetch_size=bus.max_message_bytes,
        producer_max_request_size=bus.max_message_bytes,
        producer_linger=bus.linger_ms / 1000,
        # Below 6 s the broker refuses the session (group.min.session.timeout.ms).
        broker_session_timeout=max(6.0, bus.session_timeout_s),
        broker_heartbeat_interval=1.0,
        broker_request_timeout=bus.request_timeout_s,
        broker_commit_interval=settings.commit_interval_s,
        # Few: Faust counts records, whatever their size; what is bounded in bytes is our own queue.
        stream_buffer_maxsize=64,
        stream_wait_empty=False,
    )


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _credentials(security: SecurityConfig) -> Any:
    if security.protocol == "PLAINTEXT":
        return None
    context = ssl_context(security) if security.protocol.endswith("SSL") else None
    if security.protocol == "SSL":
        return faust.SSLCredentials(context)
    return faust.SASLCredentials(
        username=security.username,
        password=security.password,
        mechanism=security.sasl_mechanism,
        ssl_context=context,
    )


def _size(event: Any) -> int:
    return len(event.value or b"")


def _record(event: Any, config: Config) -> Record:
    message = event.message
    headers = message.headers or ()
    items = headers.items() if isinstance(headers, dict) else headers
    return Record(
        topic=message.topic.removeprefix(config.bus.topic_prefix),
        partition=message.partition,
        offset=message.offset,
        key=event.key or b"",
        value=event.value or b"",
        headers=tuple(items),
        timestamp_ms=int((message.timestamp or 0) * 1000),
    )
