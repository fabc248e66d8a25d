"""What a topic's settings must be, and what is to be done where a broker has others.

A setting is never lowered where that could lose an event; partitions, replicas and clean-up are not
changed at all, since keys would move or records vanish. What is left as it is, is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollstream.config.model import BusConfig
from rollstream.topics import Cleanup, Topic

_HOUR_MS = 3_600_000
_FOREVER = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A topic as a broker has it, or should. ``settings`` are Kafka's, by Kafka's names."""

    partitions: int
    replication: int
    settings: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """``repair``: settings to set. ``left``: what differs and is used all the same, in words.
    ``refused``: what cannot be used, in words.
    """

    repair: Mapping[str, str]
    left: tuple[str, ...]
    refused: tuple[str, ...]


def wanted(topic: Topic, bus: BusConfig) -> Shape:
    """The topic as the table and the configuration want it."""
    settings = {
        "cleanup.policy": str(topic.cleanup),
        "max.message.bytes": str(bus.max_message_bytes),
        "min.insync.replicas": str(bus.in_sync),
    }
    if topic.cleanup is Cleanup.DELETE:
        settings["retention.ms"] = str(bus.retention_hours * topic.kept * _HOUR_MS)
        settings["retention.bytes"] = str(_FOREVER)
    return Shape(
        partitions=topic.partitions or bus.partitions,
        replication=bus.replication,
        settings=settings,
    )


def judge(should: Shape, found: Shape) -> Verdict:
    """What to do about a topic that was there before."""
    repair: dict[str, str] = {}
    left: list[str] = []
    refused: list[str] = []
    if found.partitions != should.partitions:
        refused.append(f"{found.partitions} partitions, not {should.partitions}")
    if found.replication < should.replication:
        refused.append(f"{found.replication} replicas, not {should.replication}")
    elif found.replication > should.replication:
        left.append(f"{found.replication} replicas, more than {should.replication}")
    for name, value in should.settings.items():
        there = found.settings.get(name, "")
        if there == value:
            continue
        if name == "cleanup.policy":
            refused.append(f"{name}={there}, not {value}")
        elif name == "min.insync.replicas" or _amount(there) < _amount(value):
            repair[name] = value
        else:
            left.append(f"{name}={there}, above {value}")
    return Verdict(repair=repair, left=tuple(left), refused=tuple(refused))


def _amount(value: str) -> float:
    """A setting as a number, of which more keeps more; -1 is without end."""
    number = int(value or 0)
    return float("inf") if number == _FOREVER else number
