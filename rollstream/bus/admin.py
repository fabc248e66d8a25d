"""Topic administration: what ``rollstream.topics`` lists is made on the broker, and verified.

aiokafka's admin client asks a broker at random, also one that is down: callers try again.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING

import structlog
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import TopicAlreadyExistsError, UnknownTopicOrPartitionError, for_code
from aiokafka.structs import TopicPartition

from rollstream.bus.security import client_settings
from rollstream.bus.topic_settings import Shape, judge, wanted
from rollstream.errors import ConfigError
from rollstream.topics import Topic

if TYPE_CHECKING:
    from rollstream.bus.kafka import KafkaBus

log = structlog.get_logger(__name__)

# Kafka's DescribeConfigs: a setting made on the topic itself.
_TOPICS_OWN = 1


@contextlib.asynccontextmanager
async def _client(bus: KafkaBus) -> AsyncIterator[AIOKafkaAdminClient]:
    client = AIOKafkaAdminClient(**client_settings(bus.config.bus))
    await client.start()
    try:
        yield client
    finally:
        await client.close()


async def ensure(bus: KafkaBus, topics: Sequence[Topic]) -> list[str]:
    """Create missing topics; repair the settings of those that are there.

    Returns what was found different, in words: repaired, or left as it is.

    Raises:
        ConfigError: a topic exists with other partitions, fewer replicas or another clean-up; it
            names all of them.
    """
    async with _client(bus) as client:
        names = {bus.full_name(topic): topic for topic in topics}
        missing = set(names) - set(await client.list_topics())
        made: set[str] = set()
        if missing:
            new = [_new(name, wanted(names[name], bus.config.bus)) for name in sorted(missing)]
            answer = await client.create_topics(new)
            for name, code, *rest in answer.topic_errors:
                error = for_code(code)
                if not code:
                    made.add(name)
                elif error is not TopicAlreadyExistsError:
                    raise error(f"{name}: {rest}")
        present = sorted(set(names) - made)
        return await _verify(bus, client, {n: names[n] for n in present}) if present else []


def _new(name: str, shape: Shape) -> NewTopic:
    return NewTopic(name, shape.partitions, shape.replication, topic_configs=dict(shape.settings))


async def _verify(
    bus: KafkaBus, client: AIOKafkaAdminClient, topics: Mapping[str, Topic]
) -> list[str]:
    found, own = await _describe(client, list(topics))
    verdicts = {
        name: judge(wanted(topic, bus.config.bus), found[name]) for name, topic in topics.items()
    }
    if refused := [f"{n} has {'; '.join(v.refused)}" for n, v in verdicts.items() if v.refused]:
        raise ConfigError(
            f"topic {'. Topic '.join(refused)}",
            hint="set bus.partitions and bus.replication to what is there, or use another"
            " bus.topic_prefix",
        )
    said = [f"{n}: {what}: left as it is" for n, v in verdicts.items() for what in v.left]
    repairs = {name: v.repair for name, v in verdicts.items() if v.repair}
    for name, repair in repairs.items():
        for key, value in repair.items():
            was = found[name].settings.get(key, "nothing")
            said.append(f"{name}: {key} was {was}, now {value}")
    if repairs:
        # The request replaces all that was ever set on a topic, so it says all of it.
        changes = [
            ConfigResource(ConfigResourceType.TOPIC, name, configs={**own[name], **repair})
            for name, repair in repairs.items()
        ]
        for altered in await client.alter_configs(changes):
            for code, message, _, name in altered.resources:
                if code:
                    raise for_code(code)(f"{name}: {message}")
    for line in said:
        log.warning("topic with other settings", found=line)
    return said


async def _describe(
    client: AIOKafkaAdminClient, names: list[str]
) -> tuple[dict[str, Shape], dict[str, dict[str, str]]]:
    """Topics as they are, and of each the settings that are its own, not the broker's."""
    settings: dict[str, dict[str, str]] = {}
    own: dict[str, dict[str, str]] = {}
    asked = [ConfigResource(ConfigResourceType.TOPIC, name) for name in names]
    for answer in await client.describe_configs(asked):
        for code, message, _, name, entries in answer.resources:
            if code:
                raise for_code(code)(f"{name}: {message}")
            settings[name] = {entry[0]: entry[1] for entry in entries}
            own[name] = {entry[0]: entry[1] for entry in entries if entry[3] == _TOPICS_OWN}
    shapes = {
        described["topic"]: Shape(
            partitions=len(described["partitions"]),
            replication=min((len(p["replicas"]) for p in described["partitions"]), default=0),
            settings=settings[described["topic"]],
        )
        for described in await client.describe_topics(names)
    }
    return shapes, own


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
            "min.insync.replicas": str(bus.config.bus.in_sync),
        }
        shape = Shape(
            partitions=partitions, replication=bus.config.bus.replication, settings=settings
        )
        answer = await client.create_topics([_new(name, shape)])
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
