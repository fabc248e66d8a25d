"""The sink: every event of every topic as rows in ClickHouse, exactly once.

The table ``ingested`` is the commit log. A chunk's rows are inserted first, each table under the
chunk's token; then its line in ``ingested``. On start the sink goes on after the last line. A crash
in between repeats the inserts: the tokens make them no-ops, and where a chunk is cut differently
the second time, the tables' keys do. An event that cannot be decoded is a dead letter, and its
offset is counted in ``ingested.broken``, so that there is no gap.

| task | waits for | unblocked by |
|---|---|---|
| main loop | records, or ``flush_interval_s`` | Kafka, time |
| inserts (in a thread) | the store | the store; retried until it answers |
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import stamina
import structlog

from rollstream import lifecycle
from rollstream.bus import Consumer, Producer, Record
from rollstream.bus.deadletters import dead_letter, send_dead_letter
from rollstream.bus.kafka import KafkaBus
from rollstream.errors import ContractError, InfraError
from rollstream.lifecycle import Service, ServiceContext
from rollstream.telemetry import extract
from rollstream.topics import ALL, BY_NAME, DEAD_LETTERS
from trajectories.chunks import Chunk, ChunkBuilder
from trajectories.client import store_client
from trajectories.migrations import migrate
from trajectories.rows import COLUMNS, Origin, Row, rows_of

log = structlog.get_logger(__name__)

_POLL_RECORDS = 2000
_LAG_EVERY_S = 1.0
# A line in `ingested` must not overtake its rows; the store is asked again for this long before the
# sink restarts (and begins at the same place).
_STORE_BUDGET_S = 120.0
_SETTINGS = {"async_insert": 0, "deduplicate_blocks_in_dependent_materialized_views": 1}


class Sink(Service):
    """Writes the topics into the store."""

    name = "sink"

    def __init__(self, context: ServiceContext) -> None:
        super().__init__(context)
        self._bus = KafkaBus(self.config)
        self._builders: dict[tuple[str, int], ChunkBuilder] = {}
        self._rows = 0
        self._records = 0
        self._broken = 0
        self._lag_records = 0.0
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

    async def run(self) -> None:
        self._log = await self._bus.cluster_id()
        self._client = await asyncio.to_thread(self._open_store)
        producer = self._bus.producer(client_id="sink")
        consumer = self._bus.consumer(ALL, client_id="sink")
        await producer.start()
        await consumer.start()
        try:
            await self._seek(consumer)
            self._ready = True
            await self._serve(consumer, producer)
        finally:
            await consumer.stop()
            await producer.stop()

    def _open_store(self) -> Any:
        database = self.config.store.database
        root = store_client(self.config, database="default")
        root.command(f"CREATE DATABASE IF NOT EXISTS `{database}`")
        client = store_client(self.config)
        migrate(client, database)
        return client

    async def _seek(self, consumer: Consumer) -> None:
        """Go on after what the store holds of this broker's log."""
        query = (
            "SELECT _topic, _partition, max(last) FROM ingested WHERE _log = {log:String}"
            " GROUP BY _topic, _partition"
        )
        result = await asyncio.to_thread(self._client.query, query, parameters={"log": self._log})
        for name, partition, last in result.result_rows:
            if name in BY_NAME:
                consumer.seek(BY_NAME[name], partition, last + 1)

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
            if now - flushed >= store.flush_interval_s:
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

    async def _flush(self, producer: Producer) -> None:
        for builder in self._builders.values():
            for chunk in builder.flush():
                await self._insert(chunk, producer)

    async def _measure_lag(self, consumer: Consumer) -> None:
        held = sum(1 for builder in self._builders.values() if builder.held_bytes)
        behind = sum(p.end - p.position for p in await consumer.positions())
        self._lag_records = behind + held

    async def _insert(self, chunk: Chunk, producer: Producer) -> None:
        tables, broken = await self._convert(chunk, producer)
        started = time.monotonic()
        try:
            await asyncio.to_thread(self._write, chunk, tables, broken)
        except Exception as error:
            raise InfraError(
                f"the store refused {chunk.token(self._log)} for {_STORE_BUDGET_S:.0f} s: {error}",
                hint="is the store up, and is there space?",
            ) from error
        self._records += len(chunk.records)
        self._rows += sum(len(rows) for rows in tables.values())
        log.debug("chunk", token=chunk.token(self._log), s=round(time.monotonic() - started, 3))

    async def _convert(self, chunk: Chunk, producer: Producer) -> tuple[dict[str, list[Row]], int]:
        """Rows by table, in the order in which the tables are to be written; and broken records."""
        tables: dict[str, list[Row]] = defaultdict(list)
        broken = 0
        for record in chunk.records:
            try:
                event = self._bus.decode(record)
                for table, row in rows_of(event, _origin(record, self._log)):
                    tables[table].append(row)
            except ContractError as error:
                broken += 1
                await self._bury(record, error, producer)
        self._broken += broken
        return tables, broken

    async def _bury(self, record: Record, error: ContractError, producer: Producer) -> None:
        log.error("broken", topic=record.topic, offset=record.offset, error=str(error))
        if record.topic == DEAD_LETTERS.name:
            return  # a dead letter about a dead letter would never end
        letter = dead_letter(record, error, service=self.name, run_id=self.config.run.id)
        await send_dead_letter(producer, letter)

    @stamina.retry(on=Exception, attempts=None, timeout=_STORE_BUDGET_S, wait_max=2.0)
    def _write(self, chunk: Chunk, tables: Mapping[str, list[Row]], broken: int) -> None:
        token = chunk.token(self._log)
        for table, rows in tables.items():
            self._put(table, rows, f"{token}:{table}")
        line = (
            self._log, chunk.topic, chunk.partition, chunk.first, chunk.last,
            len(chunk.records), broken,
        )  # fmt: skip
        self._put("ingested", [line], token)

    def _put(self, table: str, rows: list[Row], token: str) -> None:
        self._client.insert(
            table,
            rows,
            column_names=COLUMNS[table],
            settings={**_SETTINGS, "insert_deduplication_token": token},
        )


def _origin(record: Record, log_id: str) -> Origin:
    return Origin(
        log=log_id,
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        trace_id=_trace_id(record),
    )


def _trace_id(record: Record) -> str:
    from opentelemetry import trace

    span = trace.get_current_span(extract(record.headers)).get_span_context()
    return f"{span.trace_id:032x}" if span.is_valid else ""


if __name__ == "__main__":
    sys.exit(lifecycle.main(Sink))
