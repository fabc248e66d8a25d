"""The bus against a real Apache Kafka."""

from __future__ import annotations

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from rollstream import codecs, ids, telemetry
from rollstream.bus.kafka import KafkaBus
from rollstream.config import load
from rollstream.errors import ConfigError, InfraError
from rollstream.net import free_port
from rollstream.topics import ALL, REPLAY, TASKS_SHORT
from rollstream.v1 import events_pb2
from tests.conftest import MakeConfig
from tests.services import read, send
from tests.waiting import until


def task(number: int, *, size: int = 10) -> events_pb2.Task:
    return events_pb2.Task(
        header=codecs.header("run", ids.event_id("Task", number)),
        task_id=f"t{number}",
        source="x" * size,
    )


async def test_events_survive_large_and_small(kafka: str, make_config: MakeConfig) -> None:
    config = make_config(kafka, "bus.max_inline_bytes=1000")
    await KafkaBus(config).ensure_topics([TASKS_SHORT])
    sent = [task(i, size=5000 if i % 5 == 0 else 10) for i in range(20)]
    await send(config, TASKS_SHORT, [(t.task_id, t) for t in sent])
    found = await read(config, TASKS_SHORT, len(sent))
    assert {event.task_id: event for _, event in found} == {t.task_id: t for t in sent}
    # The large ones travelled by reference.
    by_reference = [r for r, _ in found if any(k == "rollstream-blob" for k, _ in r.headers)]
    assert len(by_reference) == 4
    assert all(record.value == b"" for record in by_reference)


async def test_a_lost_blob_is_an_error_that_names_it(kafka: str, make_config: MakeConfig) -> None:
    config = make_config(kafka, "bus.max_inline_bytes=100")
    bus = KafkaBus(config)
    await bus.ensure_topics([TASKS_SHORT])
    await send(config, TASKS_SHORT, [("k", task(1, size=500))])
    blobs = [p for p in (config.run.dir / "blobs").rglob("*") if p.is_file()]
    assert len(blobs) == 1
    blobs[0].unlink()
    with pytest.raises(InfraError, match=blobs[0].name):
        await read(config, TASKS_SHORT, 1)


async def test_only_what_is_done_is_committed(kafka: str, make_config: MakeConfig) -> None:
    config = make_config(kafka, "bus.partitions=1")
    bus = KafkaBus(config)
    await bus.ensure_topics([TASKS_SHORT])
    await send(config, TASKS_SHORT, [("k", task(i)) for i in range(10)])

    deliveries: list[set[int]] = []

    async def consume(skip: set[int]) -> list[int]:
        deliveries.append(set())
        consumer = bus.consumer([TASKS_SHORT], client_id="c", group_id="g")
        await consumer.start()
        got: list[int] = []

        async def poll() -> bool:
            for record in await consumer.poll(timeout_s=0.2):
                got.append(record.offset)
                deliveries[-1].add(record.deliveries)
                if record.offset not in skip:
                    consumer.done(record)
            return bool(got) and got[-1] == 9

        await until(poll)
        await consumer.stop()
        return got

    assert await consume(skip={4, 7}) == list(range(10))
    # Everything from the first unfinished record on comes again.
    assert await consume(skip=set()) == [4, 5, 6, 7, 8, 9]
    assert deliveries == [{0}, {1}]


async def test_topics_are_made_from_the_table_and_verified(
    kafka: str, make_config: MakeConfig
) -> None:
    config = make_config(kafka)
    bus = KafkaBus(config)
    await bus.ensure_topics(ALL)
    await bus.ensure_topics(ALL)
    assert await bus.partitions(REPLAY) == 2
    other = config.model_copy(update={"bus": config.bus.model_copy(update={"partitions": 3})})
    with pytest.raises(ConfigError, match=r"has 2 partitions, not 3.*set bus.partitions"):
        await KafkaBus(other).ensure_topics(ALL)


async def test_a_topic_with_other_settings_is_repaired_and_said(
    kafka: str, make_config: MakeConfig
) -> None:
    bus = KafkaBus(make_config(kafka))
    assert await bus.ensure_topics(ALL) == []
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka)
    await admin.start()
    name = bus.full_name(REPLAY)

    async def settings() -> dict[str, str]:
        (answer,) = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, name)])
        return {entry[0]: entry[1] for entry in answer.resources[0][4]}

    async def told(key: str, value: str) -> bool:
        return (await settings())[key] == value

    week = str(7 * 24 * 3_600_000)
    try:
        other = {"retention.ms": "1000", "max.message.bytes": str(64 << 20), "segment.ms": "5000"}
        await admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, name, configs=other)])
        # A broker sees what its controller wrote a moment later.
        await until(lambda: told("retention.ms", "1000"))
        said = await bus.ensure_topics(ALL)
        await until(lambda: told("retention.ms", week))
        now = await settings()
        assert await bus.ensure_topics(ALL) == said[:1]
    finally:
        await admin.close()
    assert said == [
        f"{name}: max.message.bytes={64 << 20}, above {32 << 20}: left as it is",
        f"{name}: retention.ms was 1000, now {week}",
    ]
    # Raised; kept, since it is larger; kept, since the table says nothing of it.
    assert (now["retention.ms"], now["max.message.bytes"]) == (week, str(64 << 20))
    assert now["segment.ms"] == "5000"


async def test_another_cleanup_is_refused(kafka: str, make_config: MakeConfig) -> None:
    bus = KafkaBus(make_config(kafka))
    await bus.ensure_topics([REPLAY])
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka)
    await admin.start()
    name = bus.full_name(REPLAY)
    other = {"cleanup.policy": "compact"}
    try:
        await admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, name, configs=other)])
    finally:
        await admin.close()

    async def refused() -> bool:
        try:
            return bool(await bus.ensure_topics(ALL))
        except ConfigError as error:
            assert f"{name} has cleanup.policy=compact, not delete" in str(error)
            return True

    await until(refused)


async def test_an_unreachable_broker_is_named(make_config: MakeConfig) -> None:
    port = free_port()
    config = make_config(f"127.0.0.1:{port}", "bus.retry_budget_s=1.0")
    with pytest.raises(InfraError, match=rf"Kafka at 127.0.0.1:{port} failed.*is the broker up"):
        await KafkaBus(config).producer(client_id="x").start()


def test_no_servers_is_a_configuration_error() -> None:
    from rollstream.bus.security import client_settings

    with pytest.raises(ConfigError, match="rollstream up"):
        client_settings(load(environ={}).bus)


async def test_the_trace_crosses_kafka(kafka: str, make_config: MakeConfig) -> None:
    config = make_config(kafka)
    await KafkaBus(config).ensure_topics([TASKS_SHORT])
    tracer = TracerProvider().get_tracer("test")
    with tracer.start_as_current_span("producer") as span:
        await send(config, TASKS_SHORT, [("k", task(1))])
    ((record, _),) = await read(config, TASKS_SHORT, 1)
    found = trace.get_current_span(telemetry.extract(record.headers)).get_span_context()
    assert found.trace_id == span.get_span_context().trace_id
