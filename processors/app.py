"""The Faust app: the stream, the changelogged tables, and acknowledgement after delivery.

Faust is at-least-once here. A record is acknowledged only when everything it caused is on the
broker (``Outbox``); after a crash records come again, meet tables as of the last commit, and cause
the same events under the same ids. Nothing is ever raised into Faust: there an exception
acknowledges and skips the record.

Time passes by records too: a tick on an internal topic, in the partition of its group, because a
table may only be written while a record of that partition is being processed.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import faust
import structlog

from processors.pipeline import Emission, Origin, Pipeline
from rollstream.bus import Producer, Record
from rollstream.bus.deadletters import dead_letter, send_dead_letter
from rollstream.bus.kafka import KafkaBus, settle, ssl_context
from rollstream.config import Config
from rollstream.config.model import SecurityConfig
from rollstream.errors import ContractError, InfraError
from rollstream.topics import TRAJECTORIES
from rollstream.v1 import events_pb2

log = structlog.get_logger(__name__)

APP = "processors"
TICKS = "processors-ticks"
TABLES = ("groups", "normalisers")
_TICK = struct.Struct("<d")
# Records in the outbox: bounds what is repeated after a crash, and the memory.
_OUTBOX_RECORDS = 2048
_TRIES = 3

Ack = Callable[[], Awaitable[None]]


def table_names(config: Config) -> list[str]:
    """The changelog topics that the tables need, as the broker knows them."""
    return [f"{config.bus.topic_prefix}{APP}-{table}-changelog" for table in TABLES]


class Outbox:
    """Acknowledges records in order, each after the deliveries it waits for.

    What it waits for: delivery futures of the producer. A delivery that fails for good is an
    ``InfraError`` out of ``run``: the service ends, and begins again at the last commit.
    """

    def __init__(self) -> None:
        self._queue: asyncio.Queue[tuple[list[asyncio.Future[object]], Ack]] = asyncio.Queue(
            _OUTBOX_RECORDS
        )
        self.events_total = 0

    async def put(self, deliveries: list[asyncio.Future[object]], ack: Ack) -> None:
        await self._queue.put((deliveries, ack))

    async def run(self) -> None:
        while True:
            deliveries, ack = await self._queue.get()
            await settle(deliveries)
            await ack()
            self.events_total += 1

    @property
    def waiting(self) -> int:
        return self._queue.qsize()


class ProcessorApp:
    """One life of the Faust app; ``faust.App`` cannot be started twice."""

    def __init__(self, config: Config, bus: KafkaBus, producer: Producer) -> None:
        self.config = config
        self.outbox = Outbox()
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.dead_letters_total = 0
        self._bus = bus
        self._producer = producer
        self.app = _make_app(config)
        raw = {"key_type": bytes, "value_type": bytes}
        raw_codec = {"key_serializer": "raw", "value_serializer": "raw"}
        tables = [
            self.app.Table(name, default=bytes, partitions=config.bus.partitions, **raw)
            for name in TABLES
        ]
        self.groups, self.normalisers = tables
        self.pipeline = Pipeline(config, groups=self.groups, normalisers=self.normalisers)
        source = self.app.topic(bus.full_name(TRAJECTORIES), **raw, **raw_codec)
        ticks = self.app.topic(config.bus.topic_prefix + TICKS, **raw, **raw_codec)
        self._ticks = ticks
        self.app.agent(source, name="score")(self._consume(self._trajectory))
        self.app.agent(ticks, name="ticks")(self._consume(self._tick))

    def recover_open_groups(self) -> None:
        """After the tables were restored: know again which groups wait."""
        for key, value in self.groups.items():
            self.pipeline.recover(key, value)

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

    def _consume(
        self, handle: Callable[[Any], Awaitable[list[asyncio.Future[object]]]]
    ) -> Callable[[Any], Awaitable[None]]:
        async def agent(stream: Any) -> None:
            async for event in stream.noack().events():
                try:
                    deliveries = await self._guarded(handle, event)
                except Exception as error:  # noqa: BLE001 - an exception would acknowledge the record
                    if not self.failure.done():
                        self.failure.set_exception(error)
                    return
                await self.outbox.put(deliveries, partial(stream.ack, event))

        return agent

    async def _guarded(
        self, handle: Callable[[Any], Awaitable[list[asyncio.Future[object]]]], event: Any
    ) -> list[asyncio.Future[object]]:
        """Handle one record; one that cannot be handled becomes a dead letter, the rest goes on."""
        record = _record(event, self.config)
        for tries in range(1, _TRIES + 1):
            try:
                return await handle(event)
            except InfraError:
                raise
            except ContractError as error:
                await self._bury(record, error)
                return []
            except Exception as error:
                log.exception("handler crashed", tries=tries, offset=record.offset)
                if tries == _TRIES:
                    await self._bury(record, error)
        return []

    async def _bury(self, record: Record, error: Exception) -> None:
        log.error("dead letter", topic=record.topic, offset=record.offset, error=str(error))
        trajectory = _as_trajectory(record)
        letter = dead_letter(
            record,
            error,
            service=APP,
            run_id=self.config.run.id,
            task_id=trajectory.task_id,
            rollout_id=trajectory.rollout_id,
            samples=int(trajectory.purpose == events_pb2.PURPOSE_TRAIN),
        )
        await send_dead_letter(self._producer, letter)
        self.dead_letters_total += 1

    async def _trajectory(self, event: Any) -> list[asyncio.Future[object]]:
        trajectory = self._bus.decode(_record(event, self.config))
        assert isinstance(trajectory, events_pb2.Trajectory)
        origin = Origin(partition=event.message.partition, offset=event.message.offset)
        return await self._send(self.pipeline.on_trajectory(trajectory, origin))

    async def _tick(self, event: Any) -> list[asyncio.Future[object]]:
        (now_s,) = _TICK.unpack(event.value)
        partition = event.message.partition
        return await self._send(self.pipeline.on_tick(event.key, now_s, partition=partition))

    async def _send(self, emissions: list[Emission]) -> list[asyncio.Future[object]]:
        return [
            await self._producer.send(topic, message, key=key) for topic, key, message in emissions
        ]


def _make_app(config: Config) -> Any:
    bus, settings = config.bus, config.processors
    store = "memory://" if settings.table_store == "memory" else "rocksdb://"
    return faust.App(
        f"{bus.topic_prefix}{APP}",
        broker=[f"kafka://{server}" for server in bus.bootstrap_servers.split(",")],
        broker_credentials=_credentials(bus.security),
        datadir=str(_made(config.run.dir / "faust")),
        store=store,
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
        stream_buffer_maxsize=_OUTBOX_RECORDS,
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


def _as_trajectory(record: Record) -> events_pb2.Trajectory:
    """What can be told of a record that may be broken."""
    try:
        return events_pb2.Trajectory.FromString(record.value)
    except Exception:  # noqa: BLE001 - broken bytes tell nothing
        return events_pb2.Trajectory()
