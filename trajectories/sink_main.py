"""The sink: every event of every topic as rows in ClickHouse, exactly once.

The table ``ingested`` is the commit log (see ``trajectories.writer``): on start the sink goes on
after its last line. An event that cannot be decoded is a dead letter, and its offset is counted in
``ingested.broken``, so that there is no gap.

While the store does not answer, one chunk is tried again and nothing more is read: what is held is
bounded by one poll and by ``store.chunk_bytes``. After two minutes the sink ends, and begins again
at the same place.

| task | waits for | unblocked by |
|---|---|---|
| main loop | records, or ``flush_interval_s`` | Kafka, time |
| conversion and inserts (in a thread) | the blob store, the store | they; tried again till then |
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import stamina
import structlog

from rollstream import lifecycle
from rollstream.bus import Consumer, Producer, Record
from rollstream.bus.deadletters import dead_letter, send_dead_letter
from rollstream.errors import ConfigError, ContractError, InfraError
from rollstream.lifecycle import Service, ServiceContext
from rollstream.liveness import Progress
from rollstream.topics import ALL, BY_NAME, DEAD_LETTERS
from trajectories.chunks import Chunk, ChunkBuilder
from trajectories.client import store_client
from trajectories.migrations import migrate
from trajectories.writer import ChunkWriter

log = structlog.get_logger(__name__)

_POLL_RECORDS = 2000
_LAG_EVERY_S = 1.0
# A line in `ingested` must not overtake its rows; the store is asked again for this long before the
# sink restarts (and begins at the same place).
_STORE_BUDGET_S = 120.0
_RETRY_S = 2.0
T = TypeVar("T")


class Sink(Service):
    """Writes the topics into the store."""

    name = "sink"

    def __init__(self, context: ServiceContext) -> None:
        super().__init__(context)
        self._bus = context.connect(self.config)
        self._builders: dict[tuple[str, int], ChunkBuilder] = {}
        self._rows = 0
        self._records = 0
        self._broken = 0
        self._lag_records = 0.0
        self._consumer: Consumer | None = None
        self._ready = False

    def ready(self) -> bool:
        return self._ready

    def stats(self) -> Mapping[str, float]:
        return {
            "rows_total": self._rows,
            "records_total": self._records,
            "broken_total": self._broken,
            "lag_records": self._lag_records,
        }

    async def progress(self) -> Progress | None:
        if self._consumer is None or not self._ready:
            return None
        behind = sum(at.end - at.position for at in await self._consumer.positions())
        held = sum(builder.held_records for builder in self._builders.values())
        return Progress(waiting=behind + held, done=self._records)

    async def run(self) -> None:
        log_id = await self._log_id()
        self._writer = await self._again(lambda: self._open_store(log_id), "opening the store")
        producer = self._bus.producer(client_id="sink")
        consumer = self._consumer = self._bus.consumer(ALL, client_id="sink")
        await producer.start()
        await consumer.start()
        try:
            await self._seek(consumer)
            self._ready = True
            await self._serve(consumer, producer)
        finally:
            await consumer.stop()
            await producer.stop()

    async def _log_id(self) -> str:
        """Names the log whose offsets are stored: a cluster, and the topics of one prefix on it."""
        prefix = self.config.bus.topic_prefix
        cluster = await self._bus.cluster_id()
        return f"{cluster}:{prefix}" if prefix else cluster

    def _open_store(self, log_id: str) -> ChunkWriter:
        database = self.config.store.database
        root = store_client(self.config, database="default")
        root.command(f"CREATE DATABASE IF NOT EXISTS `{database}`")
        client = store_client(self.config)
        migrate(client, database)
        return ChunkWriter(client, log=log_id)

    async def _seek(self, consumer: Consumer) -> None:
        """Go on after what the store holds of this log.

        Raises:
            ConfigError: the log is shorter than what the store holds of it.
        """
        stored = await self._again(self._writer.stored, "asking the store where to go on")
        if not stored:
            return
        for at in await consumer.positions():
            last = stored.get((at.topic, at.partition))
            if last is None:
                continue
            if last >= at.end:
                # Its offsets name other events now, which the tokens would take for repeats.
                raise ConfigError(
                    f"{at.topic}/{at.partition} ends at offset {at.end} and the store has it up to"
                    f" {last}: the topic was made anew, or the broker lost its tail",
                    hint="use another bus.topic_prefix, or another store.database",
                )
            consumer.seek(BY_NAME[at.topic], at.partition, last + 1)

    async def _serve(self, consumer: Consumer, producer: Producer) -> None:
        store = self.config.store
        flushed = lagged = time.monotonic()
        while not self.context.stopping.is_set():
            left = flushed + store.flush_interval_s - time.monotonic()
            records = await consumer.poll(
                max_records=_POLL_RECORDS, timeout_s=min(0.5, max(0.01, left))
            )
            for chunk in self._collect(records):
                await self._insert(chunk, producer)
            now = time.monotonic()
            if now - flushed >= store.flush_interval_s or self._held_bytes() > store.chunk_bytes:
                await self._flush(producer)
                flushed = now
            if now - lagged >= _LAG_EVERY_S:
                await self._measure_lag(consumer)
                lagged = now
        await self._flush(producer)

    def _collect(self, records: list[Record]) -> list[Chunk]:
        store = self.config.store
        chunks = []
        for record in records:
            key = (record.topic, record.partition)
            builder = self._builders.get(key)
            if builder is None:
                builder = self._builders[key] = ChunkBuilder(
                    size=store.chunk_records, limit_bytes=store.chunk_bytes
                )
            chunks += builder.add(record)
        return chunks

    def _held_bytes(self) -> int:
        return sum(builder.held_bytes for builder in self._builders.values())

    async def _flush(self, producer: Producer) -> None:
        for builder in self._builders.values():
            for chunk in builder.flush():
                await self._insert(chunk, producer)

    async def _measure_lag(self, consumer: Consumer) -> None:
        try:
            behind = sum(p.end - p.position for p in await consumer.positions())
        except InfraError as error:
            # Reading goes on by itself once the broker is back; the lag is only shown.
            log.warning("lag not known", error=str(error))
            return
        held = sum(builder.held_records for builder in self._builders.values())
        self._lag_records = behind + held

    async def _insert(self, chunk: Chunk, producer: Producer) -> None:
        token = chunk.token(self._writer.log)
        converted = await self._again(
            lambda: self._writer.convert(chunk, self._bus.decode), f"reading {token}"
        )
        for record, error in converted.broken:
            await self._bury(record, error, producer)
        started = time.monotonic()
        await self._again(lambda: self._writer.write(chunk, converted), f"inserting {token}")
        self._records += len(chunk.records)
        self._broken += len(converted.broken)
        self._rows += converted.rows
        log.debug("chunk", token=token, s=round(time.monotonic() - started, 3))

    async def _bury(self, record: Record, error: ContractError, producer: Producer) -> None:
        log.error("broken", topic=record.topic, offset=record.offset, error=str(error))
        if record.topic == DEAD_LETTERS.name:
            return  # a dead letter about a dead letter would never end
        letter = dead_letter(record, error, service=self.name, run_id=self.config.run.id)
        await send_dead_letter(producer, letter)

    async def _again(self, work: Callable[[], T], what: str) -> T:
        """Do ``work`` in a thread until it succeeds, or the budget is spent."""
        try:
            async for attempt in stamina.retry_context(
                on=_may_pass, attempts=None, timeout=_STORE_BUDGET_S, wait_max=_RETRY_S
            ):
                with attempt:
                    return await asyncio.to_thread(work)
        except Exception as error:
            if not _may_pass(error):
                raise
            raise InfraError(
                f"{what} failed for {_STORE_BUDGET_S:.0f} s: {error}",
                hint="is the store up, and is there space?",
            ) from error
        raise AssertionError("stamina ends by returning or raising")


def _may_pass(error: Exception) -> bool:
    """Whether trying again may help: the store or the blob store refused, or was not there."""
    from clickhouse_connect.driver.exceptions import ClickHouseError

    return isinstance(error, (ClickHouseError, InfraError, OSError))


if __name__ == "__main__":
    sys.exit(lifecycle.main(Sink))
