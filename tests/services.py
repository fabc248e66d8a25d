"""Services inside a test: started on the test's loop, stopped with the block, errors not swallowed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

from google.protobuf.message import Message

from rollstream.bus import Record
from rollstream.bus.kafka import KafkaBus
from rollstream.config import Config
from rollstream.lifecycle import Service, ServiceContext
from rollstream.topics import Topic
from tests.waiting import until

Kind = TypeVar("Kind", bound=Service)


@contextlib.asynccontextmanager
async def running(kind: type[Kind], config: Config) -> AsyncIterator[Kind]:
    """A service that is ready; at the end it drains."""
    context = ServiceContext(config=config)
    service = kind(context)
    task = asyncio.create_task(service.run(), name=kind.name)
    try:
        await until(lambda: service.ready() or task.done(), seconds=60)
        if task.done():
            task.result()
        yield service
    finally:
        context.stopping.set()
        await asyncio.wait_for(task, 30)


async def send(config: Config, topic: Topic, events: Sequence[tuple[str, Message]]) -> None:
    producer = KafkaBus(config).producer(client_id="test")
    await producer.start()
    await producer.send_batch(topic, events)
    await producer.stop()


async def send_bytes(config: Config, topic: Topic, key: str, value: bytes) -> None:
    """Bytes that no producer of ours would send."""
    from aiokafka import AIOKafkaProducer

    producer = AIOKafkaProducer(bootstrap_servers=config.bus.bootstrap_servers)
    await producer.start()
    await producer.send_and_wait(KafkaBus(config).full_name(topic), value, key=key.encode())
    await producer.stop()


async def read(
    config: Config, topic: Topic, count: int, *, seconds: float = 60.0
) -> list[tuple[Record, Message]]:
    """At least ``count`` events of a topic from its beginning; fails when they do not come."""
    bus = KafkaBus(config)
    consumer = bus.consumer([topic], client_id="test-reader")
    await consumer.start()
    found: list[tuple[Record, Message]] = []

    async def enough() -> bool:
        records = await consumer.poll(timeout_s=0.2)
        found.extend((record, bus.decode(record)) for record in records)
        return len(found) >= count

    try:
        await until(enough, seconds=seconds)
    finally:
        await consumer.stop()
    return found
