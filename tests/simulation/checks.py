"""What must hold: while a run goes on, and when it has come to rest."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import xxhash

from rollstream import codecs, ids
from rollstream.bus import Record
from rollstream.bus.claim import DIGEST
from rollstream.errors import ContractError
from rollstream.testing.memory_broker import Offsets
from rollstream.topics import (
    ALL,
    DEAD_LETTERS,
    POLICY_VERSIONS,
    TASKS,
    TRAINING_STEPS,
    TRAJECTORIES,
    Topic,
)
from rollstream.v1 import events_pb2, policy_pb2
from tests.simulation.store import Reader
from trajectories.accounting import Books, balance, read_ledger
from trajectories.rows import COLUMNS

if TYPE_CHECKING:
    from tests.simulation.world import World

_TASKS = {topic.name: topic for topic in TASKS.values()}


def on_commit(world: World, group: str, offsets: Offsets) -> None:
    """A task that is committed as done has all its trajectories on the log, or is a dead letter."""
    if group != "rollouts":
        return
    finished = {
        t.rollout_id for t in events(world, TRAJECTORIES) if isinstance(t, events_pb2.Trajectory)
    }
    # One that was damaged when it was written was there.
    finished |= {t.rollout_id for t in damaged(world, TRAJECTORIES)}
    buried = {
        (x.topic, x.partition, x.offset)
        for x in events(world, DEAD_LETTERS)
        if isinstance(x, events_pb2.DeadLetter)
    }
    for (name, partition), (offset, _) in offsets.items():
        for record in world.broker.log(name, partition)[:offset]:
            if (name, partition, record.offset) in buried:
                continue
            task = decoded(_TASKS[name], record)
            if not isinstance(task, events_pb2.Task):
                world.violated(f"{name}/{partition}: {record.offset} is committed and not buried")
                continue
            wanted = {ids.rollout_id(task.task_id, i) for i in range(task.group_size)}
            if wanted - finished:
                world.violated(
                    f"{name}/{partition}: {record.offset} is committed and"
                    f" {len(wanted - finished)} of its rollouts are not on the log"
                )


def damaged(world: World, topic: Topic) -> list[Any]:
    """The events that were changed on the disk, as they were written."""
    found = []
    for (name, _), value in world.broker.damaged.items():
        # What was garbage before is none.
        with contextlib.suppress(ContractError):
            found += [codecs.decode(topic, value)] if name == topic.name else []
    return found


def events(world: World, topic: Topic) -> list[object]:
    """What can be decoded of a topic, in log order by partition."""
    cache = world.decoded.setdefault(topic.name, [[], defaultdict(int)])
    found, seen = cache
    for partition in range(world.broker.partitions(topic.name)):
        rows = world.broker.log(topic.name, partition)
        for record in rows[seen[partition] :]:
            if (event := decoded(topic, record)) is not None:
                found.append(event)
        seen[partition] = len(rows)
    return list(found)


def decoded(topic: Topic, record: Record) -> object | None:
    """The event, as the services see it: None when its digest says that it was changed."""
    digests = [data for key, data in record.headers if key == DIGEST]
    if any(data != xxhash.xxh3_64_digest(record.value) for data in digests):
        return None
    try:
        return codecs.decode(topic, record.value)
    except ContractError:
        return None


def books(world: World) -> Books:
    return balance(read_ledger(Reader(world.outside.store), world.config.run.id))


def unfinished(world: World) -> str | None:
    """What is still to be done; None when all is at rest."""
    versions = [
        v for v in events(world, POLICY_VERSIONS) if isinstance(v, policy_pb2.PolicyVersion)
    ]
    if not any(v.final for v in versions):
        return f"no final version; newest {max((v.version for v in versions), default=None)}"
    stored = {
        (row["_topic"], row["_partition"]): row["last"] + 1
        for row in sorted(world.outside.store.rows("ingested"), key=lambda r: r["last"])
    }
    for topic in ALL:
        for partition in range(world.broker.partitions(topic.name)):
            end = world.broker.end((topic.name, partition))
            if stored.get((topic.name, partition), 0) < end:
                return f"{topic.name}/{partition} is stored up to {stored.get((topic.name, partition), 0)} of {end}"
    found = books(world)
    if found.in_flight:
        return f"{found.in_flight} samples in flight: {found}"
    return None


def at_rest(world: World) -> list[str]:
    """What is wrong when all is at rest."""
    found = books(world)
    wrong = list(found.problems)
    if not found.balanced or found.in_flight:
        wrong.append(f"the books do not balance: {found}")
    wrong += _store_holds_the_log(world)
    wrong += _lineages(world)
    wrong += _attempts(world)
    wrong += _versions(world)
    return wrong


def _store_holds_the_log(world: World) -> list[str]:
    """No gap, no overlap, no chunk twice; the rows are looked at in ``derived.py``."""
    wrong, spans = [], defaultdict(list)
    for row in world.outside.store.rows("ingested"):
        spans[row["_topic"], row["_partition"]].append((row["first"], row["last"]))
    for at, ranges in spans.items():
        reached = 0
        for first, last in sorted(ranges):
            if first > reached:
                wrong.append(f"{at}: offsets {reached}..{first - 1} were never stored")
            reached = max(reached, last + 1)
        if reached != world.broker.end(at):
            wrong.append(f"{at}: stored up to {reached}, the log ends at {world.broker.end(at)}")
    for table, blocks in world.outside.store.blocks.items():
        # Without its place in the log a row may be that of an event that was told twice.
        if table != "ingested" and "_offset" not in COLUMNS[table]:
            continue
        # Chunks that were cut differently may have the same rows; their keys make one of them.
        whole = [(token, repr(rows)) for token, rows in blocks]
        if len(set(whole)) < len(whole):
            wrong.append(f"{table}: a chunk was stored twice")
    return wrong


def _lineages(world: World) -> list[str]:
    """Each step has one record, however often it was told; each group is in one step."""
    steps: dict[str, events_pb2.TrainingStep] = {}
    groups: dict[str, str] = {}
    wrong = []
    for step in events(world, TRAINING_STEPS):
        assert isinstance(step, events_pb2.TrainingStep)
        known = steps.setdefault(step.header.event_id, step)
        if [s.SerializeToString() for s in known.samples] != [
            s.SerializeToString() for s in step.samples
        ]:
            wrong.append(f"step {step.step} was told twice, with different samples")
        for use in step.samples:
            if groups.setdefault(use.group_id, step.header.event_id) != step.header.event_id:
                wrong.append(f"group {use.group_id} is in two lineages")
    return wrong


def _attempts(world: World) -> list[str]:
    """A rollout that was done again has another attempt; unless its task is on the log twice."""
    tasks = Counter(
        t.task_id
        for topic in TASKS.values()
        for t in events(world, topic)
        if isinstance(t, events_pb2.Task)
    )
    seen: dict[tuple[str, int], bytes] = {}
    for event in events(world, TRAJECTORIES):
        assert isinstance(event, events_pb2.Trajectory)
        if tasks[event.task_id] > 1:
            continue
        data = event.SerializeToString(deterministic=True)
        if seen.setdefault((event.rollout_id, event.attempt), data) != data:
            return [f"{event.rollout_id} has two trajectories of attempt {event.attempt}"]
    return []


def _versions(world: World) -> list[str]:
    """A version is one set of weights."""
    digests: dict[int, str] = {}
    for version in events(world, POLICY_VERSIONS):
        assert isinstance(version, policy_pb2.PolicyVersion)
        if digests.setdefault(version.version, version.digest) != version.digest:
            return [f"version {version.version} was published with two sets of weights"]
    return []
