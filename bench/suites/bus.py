"""Acknowledged ingest and read of training samples through Kafka, beside plain aiokafka moving the
same bytes.

A sample is L tokens with L log-probabilities (8 L bytes of random data) and its ids; 8 of them
travel as one ``TrainingGroup``. Ingest counts until the broker has acknowledged everything,
encoding included; read counts until every event is decoded and its arrays are numpy views. The
control sends and receives the same encoded bytes with the same client settings and does nothing
else. Runs of both are interleaved.
"""

from __future__ import annotations

import asyncio
import tempfile
import time

import numpy as np
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from bench.harness import GROUP, broker, config_for, training_group
from bench.report import Report
from rollstream import codecs
from rollstream.bus.kafka import KafkaBus, client_settings, settle
from rollstream.topics import REPLAY
from rollstream.v1 import events_pb2

LENGTHS = (256, 1024, 4096)
RUNS = 5
SAMPLES = {256: 16_000, 1024: 8_000, 4096: 2_400}
NAMES = (
    *(f"bus.{kind}.samples_per_s.L{length}" for kind in ("ingest", "read") for length in LENGTHS),
    "bus.ingest.vs_raw.L1024",
    "bus.read.vs_raw.L1024",
)


def run(report: Report) -> None:
    with broker() as servers:
        for length in LENGTHS:
            asyncio.run(_length(report, servers, length))


async def _length(report: Report, servers: str, length: int) -> None:
    rng = np.random.default_rng(length)
    groups = [training_group(rng, i, length) for i in range(SAMPLES[length] // GROUP)]
    encoded = [codecs.encode(group) for group in groups]
    size = sum(map(len, encoded)) / 1e6
    samples = len(groups) * GROUP
    times: dict[str, list[float]] = {"ingest": [], "read": [], "raw_ingest": [], "raw_read": []}
    settings = ("bus.partitions=4", 'bus.compression="none"')
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(RUNS):
            # Uncompressed in both: random token ids do not compress, and the codec is not what is
            # measured.
            config = config_for(servers, folder, *settings)
            bus = KafkaBus(config)
            await bus.ensure_topics([REPLAY])
            times["ingest"].append(await _ingest(bus, groups))
            times["read"].append(await _read(bus, len(groups)))
            raw = KafkaBus(
                config_for(servers, folder, "bus.partitions=4", 'bus.compression="none"')
            )
            await raw.ensure_topics([REPLAY])
            times["raw_ingest"].append(await _raw_ingest(raw, groups, encoded))
            times["raw_read"].append(await _raw_read(raw, len(groups)))
    for kind in ("ingest", "read"):
        rates = [samples / t for t in times[kind]]
        report.median(f"bus.{kind}.samples_per_s.L{length}", rates, unit="samples/s")
        report.median(
            f"bus.{kind}.mb_per_s.L{length}", [size / t for t in times[kind]], unit="MB/s"
        )
        ratios = [r / o for r, o in zip(times[f"raw_{kind}"], times[kind], strict=True)]
        report.median(f"bus.{kind}.vs_raw.L{length}", ratios, unit="ratio")


async def _ingest(bus: KafkaBus, groups: list[events_pb2.TrainingGroup]) -> float:
    producer = bus.producer(client_id="bench")
    await producer.start()
    began = time.perf_counter()
    await producer.send_batch(REPLAY, [(group.group_id, group) for group in groups])
    took = time.perf_counter() - began
    await producer.stop()
    return took


async def _read(bus: KafkaBus, count: int) -> float:
    consumer = bus.consumer([REPLAY], client_id="bench")
    await consumer.start()
    began, got = time.perf_counter(), 0
    while got < count:
        for record in await consumer.poll(max_records=1000):
            group = bus.decode(record)
            assert isinstance(group, events_pb2.TrainingGroup)
            for sample in group.samples:
                codecs.token_array(sample.tokens)
                codecs.logprob_array(sample.tokens)
            consumer.done(record)
            got += 1
    took = time.perf_counter() - began
    await consumer.stop()
    return took


async def _raw_ingest(
    bus: KafkaBus, groups: list[events_pb2.TrainingGroup], encoded: list[bytes]
) -> float:
    config = bus.config.bus
    producer = AIOKafkaProducer(
        **client_settings(config),
        enable_idempotence=True,
        acks="all",
        linger_ms=config.linger_ms,
        max_batch_size=config.batch_bytes,
        max_request_size=config.max_message_bytes,
    )
    await producer.start()
    topic = bus.full_name(REPLAY)
    began = time.perf_counter()
    futures = [
        await producer.send(topic, value, key=group.group_id.encode())
        for group, value in zip(groups, encoded, strict=True)
    ]
    await settle(futures)
    took = time.perf_counter() - began
    await producer.stop()
    return took


async def _raw_read(bus: KafkaBus, count: int) -> float:
    config = bus.config.bus
    consumer = AIOKafkaConsumer(
        **client_settings(config),
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        fetch_max_bytes=64 << 20,
        max_partition_fetch_bytes=config.max_message_bytes,
        isolation_level="read_committed",
    )
    await consumer.start()
    consumer.assign([TopicPartition(bus.full_name(REPLAY), p) for p in range(config.partitions)])
    began, got = time.perf_counter(), 0
    while got < count:
        batches = await consumer.getmany(timeout_ms=500, max_records=1000)
        got += sum(len(messages) for messages in batches.values())
    took = time.perf_counter() - began
    await consumer.stop()
    return took
