"""Trajectories per second through the Faust service: scored, normalised, grouped, on ``replay``.

One worker process. 8 trajectories of 64 tokens a group, rewards that differ. Counted from the first
send to the last group read back; sending is several times faster than the service.
"""

from __future__ import annotations

import asyncio
import tempfile
import time

import numpy as np

from bench.harness import GROUP, broker, config_for
from bench.report import Report
from bench.services import service
from rollstream import codecs, ids
from rollstream.bus.kafka import KafkaBus
from rollstream.topics import ALL, REPLAY, TRAJECTORIES
from rollstream.v1 import events_pb2

NAMES = ("processors.events_per_s",)
RUNS, GROUPS = 3, 500
DOMAIN = 'domains=[{name="bench", environment="demo-arithmetic"}]'


def run(report: Report) -> None:
    with broker() as servers, tempfile.TemporaryDirectory() as folder:
        config = config_for(servers, folder, "bus.partitions=4", DOMAIN)
        bus = KafkaBus(config)
        asyncio.run(bus.ensure_topics(ALL))
        with service("processors", config):
            rates = [asyncio.run(_measure(bus, number)) for number in range(RUNS)]
    report.median("processors.events_per_s", rates, unit="events/s")


async def _measure(bus: KafkaBus, number: int) -> float:
    producer = bus.producer(client_id="bench")
    consumer = bus.consumer([REPLAY], client_id="bench")
    await producer.start()
    await consumer.start()
    events = [
        (event.group_id, event)
        for group in range(GROUPS)
        for event in _group(number * GROUPS + group)
    ]
    wanted = {key for key, _ in events}
    began = time.perf_counter()
    await producer.send_batch(TRAJECTORIES, events)
    while wanted:
        for record in await consumer.poll(max_records=2000):
            wanted.discard(record.key.decode())
    took = time.perf_counter() - began
    await consumer.stop()
    await producer.stop()
    return len(events) / took


def _group(number: int) -> list[events_pb2.Trajectory]:
    rng = np.random.default_rng(number)
    task_id = ids.task_id("bench", "bench", number, 0)
    tokens = codecs.make_sequence(
        rng.integers(0, 150_000, 64).astype(np.int32),
        rng.normal(-1, 0.5, 32).astype(np.float32),
        sampled=[(32, 32)],
        versions=[(0, 32, 32)],
    )
    return [
        events_pb2.Trajectory(
            header=codecs.header("bench", ids.event_id("Trajectory", number, index)),
            rollout_id=ids.rollout_id(task_id, index),
            task_id=task_id,
            group_id=ids.group_id(task_id),
            sample_index=index,
            domain="bench",
            purpose=events_pb2.PURPOSE_TRAIN,
            group_size=GROUP,
            sequences=[tokens],
            evidence=events_pb2.Evidence(
                validity=events_pb2.VALIDITY_VALID,
                items=[events_pb2.EvidenceItem(name="correct", value=float(index % 2))],
            ),
        )
        for index in range(GROUP)
    ]
