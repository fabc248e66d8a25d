"""Topics against store: what the log of each partition holds beside what the sink wrote of it.

``compare`` is a pure function; ``read_logs`` asks the broker and ``read_stored`` the store. Nothing
is read but offsets, so that the cost does not grow with the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient

from rollstream.bus.kafka import KafkaBus, within_budget
from rollstream.bus.security import client_settings
from rollstream.config import Config
from rollstream.topics import ALL

_COMPACTED = ("policy.versions", "curriculum")
At = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Topics:
    """``lag``: offsets that are not yet stored, by ``topic/partition``; ``log``: which log."""

    log: str
    lag: Mapping[str, int]
    problems: tuple[str, ...]


def compare(
    log: str, logs: Mapping[At, tuple[int, int]], stored: Mapping[At, int], *, settled: bool
) -> Topics:
    """``logs``: (low watermark, end offset) of each partition; ``stored``: the last offset stored.

    With ``settled`` nothing may be left to store.
    """
    lag: dict[str, int] = {}
    problems = []
    for (topic, partition), (low, end) in sorted(logs.items()):
        name, following = f"{topic}/{partition}", stored.get((topic, partition), -1) + 1
        if following > end:
            problems.append(
                f"{name} ends at offset {end} and the store has it up to {following - 1}: the"
                " topic was made anew, or the broker lost its tail"
            )
        elif following < low and topic not in _COMPACTED:
            problems.append(f"{name} lost offsets {following}..{low - 1} before they were stored")
        if behind := max(0, end - max(following, low)):
            lag[name] = behind
            if settled:
                problems.append(f"{name}: {behind} offsets from {max(following, low)} not stored")
    gone = sorted(set(stored) - set(logs))
    problems += [f"{topic}/{p} is in the store and not on the broker" for topic, p in gone]
    return Topics(log=log, lag=lag, problems=tuple(problems))


async def read_logs(config: Config) -> tuple[str, dict[At, tuple[int, int]]]:
    """The log's name as the sink has it, and (low watermark, end offset) of each partition.

    Raises:
        InfraError: the broker did not answer within ``bus.retry_budget_s``.
    """
    bus = KafkaBus(config)
    cluster = await bus.cluster_id()
    prefix = config.bus.topic_prefix
    names = {bus.full_name(topic): topic.name for topic in ALL}
    parts = await within_budget(config.bus, "partitions", lambda: _partitions(config, names))
    consumer = AIOKafkaConsumer(**client_settings(config.bus))
    await consumer.start()
    try:
        low = await consumer.beginning_offsets(parts) if parts else {}
        end = await consumer.end_offsets(parts) if parts else {}
    finally:
        await consumer.stop()
    log = f"{cluster}:{prefix}" if prefix else cluster
    return log, {(names[p.topic], p.partition): (low[p], end[p]) for p in parts}


async def _partitions(config: Config, names: Mapping[str, str]) -> list[TopicPartition]:
    client = AIOKafkaAdminClient(**client_settings(config.bus))
    await client.start()
    try:
        there = sorted(set(names) & set(await client.list_topics()))
        described = await client.describe_topics(there) if there else []
    finally:
        await client.close()
    return [TopicPartition(d["topic"], p["partition"]) for d in described for p in d["partitions"]]


def read_stored(client: Any, log: str) -> dict[At, int]:
    """The last stored offset of each partition of a log."""
    query = (
        "SELECT _topic, _partition, max(last) FROM ingested WHERE _log = {log:String}"
        " GROUP BY _topic, _partition"
    )
    rows = client.query(query, parameters={"log": log}).result_rows
    return {(topic, partition): last for topic, partition, last in rows}
