"""A broker as data: logs, producers' sequences, consumer groups. Every method is one indivisible
change, as a request to Kafka is; nothing here waits.

What it keeps of Kafka: one order per partition; a batch that is sent again is appended once; a
group's partitions move when a member comes, goes or has not been heard of for the session timeout,
and only after every other member has let go of its own; a commit counts only for a member of the
present generation. What it leaves out: retention and compaction (the log keeps everything).
"""

from __future__ import annotations

import contextvars
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rollstream.bus.base import Record
from rollstream.bus.marks import Partition
from rollstream.errors import ConfigError
from rollstream.topics import Topic

Offsets = Mapping[Partition, tuple[int, str]]


@dataclass(slots=True, kw_only=True)
class _Member:
    topics: tuple[str, ...]
    beat_at: float
    # Whether it has let go of its partitions and waits for new ones.
    joined: bool = True


@dataclass(slots=True, kw_only=True)
class Group:
    """One consumer group. ``offsets``: (offset, metadata) by partition."""

    members: dict[str, _Member] = field(default_factory=dict)
    assigned: dict[str, tuple[Partition, ...]] = field(default_factory=dict)
    offsets: dict[Partition, tuple[int, str]] = field(default_factory=dict)
    generation: int = 0
    preparing: bool = False


@dataclass(slots=True, kw_only=True)
class _TopicLog:
    topic: Topic
    partitions: list[list[Record]]


class MemoryBroker:
    """One broker, for any number of ``MemoryBus``.

    ``context``: in which its own part of an exchange runs, whoever asked; that of its making.
    ``on_append`` and ``on_commit`` are told of what has just happened, for tests to look.
    """

    def __init__(self, *, cluster_id: str = "memory") -> None:
        self.cluster_id = cluster_id
        self.context = contextvars.copy_context()
        self.topics: dict[str, _TopicLog] = {}
        self.groups: dict[str, Group] = {}
        self.on_append: Callable[[str, Record], None] = lambda name, record: None
        self.on_commit: Callable[[str, Offsets], None] = lambda group, offsets: None
        self._sequences: dict[tuple[str, str, int], int] = {}
        self._waiting: dict[str, list[Callable[[], None]]] = {}
        self._clients = 0

    def new_client(self, client_id: str) -> str:
        self._clients += 1
        return f"{client_id}-{self._clients}"

    # -- logs

    def ensure(self, name: str, topic: Topic, partitions: int) -> None:
        """Make a topic. ``ConfigError`` when it is there and is another."""
        found = self.topics.get(name)
        if found is None:
            self.topics[name] = _TopicLog(topic=topic, partitions=[[] for _ in range(partitions)])
            return
        if len(found.partitions) != partitions:
            raise ConfigError(
                f"topic {name} has {len(found.partitions)} partitions, not {partitions}",
                hint="set bus.partitions to what is there, or use another bus.topic_prefix",
            )
        if found.topic.cleanup != topic.cleanup:
            raise ConfigError(
                f"topic {name} has cleanup.policy={found.topic.cleanup}, not {topic.cleanup}"
            )

    def partitions(self, name: str) -> int:
        """0 when there is no such topic."""
        found = self.topics.get(name)
        return len(found.partitions) if found else 0

    def partition_of(self, name: str, key: bytes) -> int:
        return zlib.crc32(key) % max(1, self.partitions(name))

    def log(self, name: str, partition: int) -> list[Record]:
        return self.topics[name].partitions[partition]

    def produce(
        self, producer: str, name: str, partition: int, first: int, records: Sequence[Record]
    ) -> None:
        """Append a batch whose first record is the producer's ``first``-th of this partition; what
        is there already is left out.
        """
        key = (producer, name, partition)
        known = self._sequences.get(key, 0)
        for record in records[max(0, known - first) :]:
            self.append(name, partition, record)
        self._sequences[key] = max(known, first + len(records))

    def append(self, name: str, partition: int, record: Record) -> Record:
        """Append one record, at the offset that is its turn; whoever waits is woken."""
        log = self.log(name, partition)
        stored = replace(record, partition=partition, offset=len(log))
        log.append(stored)
        self.on_append(name, stored)
        for wake in self._waiting.pop(name, ()):
            wake()
        return stored

    def when_appended(self, names: Iterable[str], wake: Callable[[], None]) -> None:
        """Call ``wake`` after the next append to any of these topics, once for each."""
        for name in names:
            self._waiting.setdefault(name, []).append(wake)

    def forget(self, names: Iterable[str], wake: Callable[[], None]) -> None:
        """Nobody waits there any more."""
        for name in names:
            if wake in (waiting := self._waiting.get(name, [])):
                waiting.remove(wake)

    def end(self, partition: Partition) -> int:
        return len(self.log(*partition))

    def fetch(self, positions: Mapping[Partition, int], max_records: int) -> list[list[Record]]:
        """Up to ``max_records`` from the given positions, by partition in the order given."""
        found = []
        for (name, partition), position in positions.items():
            if rows := self.log(name, partition)[position : position + max_records]:
                found.append(rows)
                max_records -= len(rows)
            if max_records <= 0:
                break
        return found

    # -- groups

    def group(self, group_id: str) -> Group:
        return self.groups.setdefault(group_id, Group())

    def join(self, group_id: str, member: str, topics: tuple[str, ...], now: float) -> None:
        """Come in, or let go and wait for a new share."""
        group = self.group(group_id)
        if not group.preparing:
            self._prepare(group)
        group.members[member] = _Member(topics=topics, beat_at=now)
        self._complete(group)

    def heartbeat(self, group_id: str, member: str, generation: int, now: float) -> bool:
        """Whether the member still has its share; else it must join again."""
        group = self.group(group_id)
        found = group.members.get(member)
        if found is None:
            return False
        found.beat_at = now
        return not group.preparing and group.generation == generation

    def share(
        self, group_id: str, member: str, now: float
    ) -> tuple[int, tuple[Partition, ...]] | None:
        """(generation, partitions) of a member that has joined; None while others hold on.

        Raises:
            KeyError: the group does not know the member any more, or shares anew since it joined.
        """
        group = self.group(group_id)
        found = group.members[member]
        found.beat_at = now
        if not found.joined:
            raise KeyError(member)
        return None if group.preparing else (group.generation, group.assigned[member])

    def leave(self, group_id: str, member: str) -> None:
        group = self.group(group_id)
        if group.members.pop(member, None) is None:
            return
        if not group.preparing:
            self._prepare(group)
        self._complete(group)

    def commit(self, group_id: str, member: str, generation: int, offsets: Offsets) -> bool:
        """Whether the commit counts: of a member, for the present generation."""
        group = self.group(group_id)
        if member not in group.members or group.generation != generation:
            return False
        group.offsets.update(offsets)
        self.on_commit(group_id, offsets)
        return True

    @staticmethod
    def _prepare(group: Group) -> None:
        group.preparing = True
        for member in group.members.values():
            member.joined = False

    def _complete(self, group: Group) -> None:
        """Share out, once everyone has let go: each partition to one of those that want it."""
        if not all(member.joined for member in group.members.values()):
            return
        group.preparing = False
        group.generation += 1
        shares: dict[str, list[Partition]] = {name: [] for name in sorted(group.members)}
        wanted = sorted({topic for member in group.members.values() for topic in member.topics})
        for topic in wanted:
            takers = [name for name in shares if topic in group.members[name].topics]
            for partition in range(self.partitions(topic)):
                shares[takers[partition % len(takers)]].append((topic, partition))
        group.assigned = {name: tuple(share) for name, share in shares.items()}
