"""Topic administration: what ``rollstream.topics`` lists is made on the broker, and verified."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import TopicAlreadyExistsError, UnknownTopicOrPartitionError, for_code
from aiokafka.structs import TopicPartition

from rollstream.errors import ConfigError
from rollstream.topics import Cleanup, Topic

if TYPE_CHECKING:
    from rollstream.bus.kafka import KafkaBus

_HOUR_MS = 3_600_000


@contextlib.asynccontextmanager
async def _client(bus: KafkaBus) -> AsyncIterator[AIOKafkaAdminClient]:
    from rollstream.bus.kafka import client_settings

    client = AIOKafkaAdminClient(**client_settings(bus.config.bus))
    await client.start()
    try:
        yield client
    finally:
        await client.close()


async def ensure(bus: KafkaBus, topics: Sequence[Topic]) -> None:
    """Create missing topics. ``ConfigError`` when one exists with other partitions or clean-up."""
    async with _client(bus) as client:
        existing = set(await client.list_topics())
        missing = [t for t in topics if bus.full_name(t) not in existing]
        if missing:
            answer = await client.create_topics([_new(bus, t) for t in missing])
            for name, code, *rest in answer.topic_errors:
                error = for_code(code)
                if code and error is not TopicAlreadyExistsError:
                    raise error(f"{name}: {rest}")
        present = [t for t in topics if bus.full_name(t) in existing]
        if present:
            await _verify(bus, client, present)


def _settings(bus: KafkaBus, topic: Topic) -> dict[str, str]:
    settings = {
        "cleanup.policy": str(topic.cleanup),
        "max.message.bytes": str(bus.config.bus.max_message_bytes),
    }
    if topic.cleanup is Cleanup.DELETE:
        settings["retention.ms"] = str(bus.config.bus.retention_hours * _HOUR_MS)
    return settings


def _new(bus: KafkaBus, topic: Topic) -> NewTopic:
    return NewTopic(
        bus.full_name(topic),
        topic.partitions or bus.config.bus.partitions,
        bus.config.bus.replication,
        topic_configs=_settings(bus, topic),
    )


async def _verify(bus: KafkaBus, client: AIOKafkaAdminClient, topics: Sequence[Topic]) -> None:
    names = {bus.full_name(topic): topic for topic in topics}
    for described in await client.describe_topics(list(names)):
        topic = names[described["topic"]]
        wanted, found = topic.partitions or bus.config.bus.partitions, len(described["partitions"])
        if found != wanted:
            raise ConfigError(
                f"topic {described['topic']} has {found} partitions, not {wanted}",
                hint="set bus.partitions to what is there, or use another bus.topic_prefix",
            )
    asked = [ConfigResource(ConfigResourceType.TOPIC, n) for n in names]
    for answer in await client.describe_configs(asked):
        for _, _, _, name, entries in answer.resources:
            policy = next((e[1] for e in entries if e[0] == "cleanup.policy"), None)
            if policy is not None and policy != str(names[name].cleanup):
                raise ConfigError(
                    f"topic {name} has cleanup.policy={policy}, not {names[name].cleanup}",
                    hint=f"kafka-configs --alter --topic {name} --add-config cleanup.policy=...",
                )


async def create_compacted(bus: KafkaBus, name: str, *, partitions: int) -> None:
    """Create a compacted topic outside the contract (a table's changelog); ``name`` is the full
    name.
    """
    async with _client(bus) as client:
        if name in set(await client.list_topics()):
            return
        settings = {
            "cleanup.policy": "compact",
            "max.message.bytes": str(bus.config.bus.max_message_bytes),
        }
        topic = NewTopic(name, partitions, bus.config.bus.replication, topic_configs=settings)
        answer = await client.create_topics([topic])
        for created, code, *rest in answer.topic_errors:
            if code and for_code(code) is not TopicAlreadyExistsError:
                raise for_code(code)(f"{created}: {rest}")


async def partition_count(bus: KafkaBus, topic: Topic) -> int:
    """Partitions of a topic.

    ``UnknownTopicOrPartitionError`` (retried by callers) when it is missing.
    """
    async with _client(bus) as client:
        described = await client.describe_topics([bus.full_name(topic)])
        partitions = described[0]["partitions"] if described else []
        if not partitions:
            raise UnknownTopicOrPartitionError(f"topic {bus.full_name(topic)} does not exist")
        return len(partitions)


async def committed(bus: KafkaBus, group_id: str, topic: Topic) -> dict[int, int]:
    """The offsets that a group has committed, by partition; ``group_id`` is the full name."""
    name = bus.full_name(topic)
    async with _client(bus) as client:
        offsets = await client.list_consumer_group_offsets(group_id)
    return {at.partition: offset.offset for at, offset in offsets.items() if at.topic == name}


async def commit_metadata(bus: KafkaBus, group_id: str, partition: TopicPartition) -> str | None:
    """The metadata of a group's committed offset; None when it has committed none."""
    async with _client(bus) as client:
        found = await client.list_consumer_group_offsets(group_id, partitions=[partition])
    at = found.get(partition)
    return None if at is None or at.offset < 0 else str(at.metadata or "")


async def cluster_id(bus: KafkaBus) -> str:
    async with _client(bus) as client:
        described = await client.describe_cluster()
        return str(described["cluster_id"])
