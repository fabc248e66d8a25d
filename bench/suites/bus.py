"""Acknowledged ingest and read of training samples through Kafka, beside plain aiokafka moving the
same bytes.

A sample is L tokens with L log-probabilities (8 L bytes of random data) and its ids; 8 of them
travel as one ``TrainingGroup``. Ingest counts until the broker has acknowledged everything,
encoding included; read counts until every event is decoded and its arrays are numpy views. One
group per partition goes ahead of what is counted: a partition that was just made refuses its first
record once, which costs a retry. The
control sends and receives the same encoded bytes with the same client settings and does nothing
else. Runs of both are interleaved.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Coroutine
from typing import Any

import numpy as np
import uvloop
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from bench.harness import GROUP, broker, config_for, training_group
from bench.report import Report
from rollstream import codecs
from rollstream.bus.kafka import KafkaBus, settle
from rollstream.bus.security import client_settings
from rollstream.topics import REPLAY
from rollstream.v1 import events_pb2

LENGTHS = (256, 1024, 4096)
RUNS = 7
PARTITIONS = 4
SAMPLES = {256: 16_000, 1024: 8_000, 4096: 2_400}
NAMES = (
    *(f"bus.{kind}.samples_per_s.L{length}" for kind in ("ingest", "read") for length in LENGTHS),
    "bus.ingest.vs_raw.L1024",
    "bus.read.vs_raw.L1024",
    "bus.ingest.samples_per_s.L1024.brokers3",
    "bus.read.samples_per_s.L1024.brokers3",
)


def run(report: Report) -> None:
    with broker() as servers:
        for length in LENGTHS:
            _run(_length(report, servers, length))
    # Every record on three brokers, and acknowledged by two.
    with broker(3) as servers:
        _run(_length(report, servers, 1024, brokers=3))


def _run(work: Coroutine[Any, Any, None]) -> None:
    """On the loop that services run on."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work)


async def _length(report: Report, servers: str, length: int, *, brokers: int = 1) -> None:
    suffix = f"L{length}" + (f".brokers{brokers}" if brokers > 1 else "")
    rng = np.random.default_rng(length)
    groups = [training_group(rng, i, length) for i in range(SAMPLES[length] // GROUP)]
    encoded = [codecs.encode(group) for group in groups]
    size = sum(map(len, encoded)) / 1e6
    samples = len(groups) * GROUP
    times: dict[str, list[float]] = {"ingest": [], "read": [], "raw_ingest": [], "raw_read": []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(RUNS):
            # Uncompressed in both: random token ids do not compress, and the codec is not what is
            # measured.
            bus = await _fresh(servers, folder, brokers)
            times["ingest"].append(await _ingest(bus, groups))
            times["read"].append(await _read(bus, len(groups) + PARTITIONS))
            bus = await _fresh(servers, folder, brokers)
            times["raw_ingest"].append(await _raw_ingest(bus, groups, encoded))
            times["raw_read"].append(await _raw_read(bus, len(groups) + PARTITIONS))
    for kind in ("ingest", "read"):
        rates = [samples / t for t in times[kind]]
        report.median(f"bus.{kind}.samples_per_s.{suffix}", rates, unit="samples/s")
        report.median(f"bus.{kind}.mb_per_s.{suffix}", [size / t for t in times[kind]], unit="MB/s")
        ratios = [r / o for r, o in zip(times[f"raw_{kind}"], times[kind], strict=True)]
        report.median(f"bus.{kind}.vs_raw.{suffix}", ratios, unit="ratio")


async def _fresh(servers: str, folder: str, replication: int) -> KafkaBus:
    """A bus with an empty topic."""
    settings = (
        f"bus.partitions={PARTITIONS}",
        f"bus.replication={replication}",
        'bus.compression="none"',
    )
    bus = KafkaBus(config_for(servers, folder, *settings))
    await bus.ensure_topics([REPLAY])
    return bus


async def _ingest(bus: KafkaBus, groups: list[events_pb2.TrainingGroup]) -> float:
    producer = bus.producer(client_id="bench")
    await producer.start()
    for partition in range(PARTITIONS):
        await (await producer.send(REPLAY, groups[0], key="warm-up", partition=partition))
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
    for partition in range(PARTITIONS):
        await producer.send_and_wait(topic, encoded[0], key=b"warm-up", partition=partition)
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
        max_partition_fetch_bytes=config.fetch_bytes,
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
