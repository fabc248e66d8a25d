"""What follows from the log alone, derived once more at rest and compared with what the services made of it."""

from __future__ import annotations

import contextlib
import hashlib
import struct
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from rollstream import codecs, ids
from rollstream.bus import Record
from rollstream.errors import ContractError
from rollstream.topics import ALL, DEAD_LETTERS, REPLAY, REWARDS, TASKS, TRAINING_STEPS, Topic
from rollstream.v1 import events_pb2
from tests.simulation.checks import damaged, decoded, events
from trainer.checkpoint import CheckpointStore
from trajectories.chunks import Chunk
from trajectories.rows import COLUMNS
from trajectories.writer import ChunkWriter

if TYPE_CHECKING:
    from tests.simulation.world import World

# Tasks of one batch are made at one time.
_BATCH_NS = 1_000_000
_TASKS = {topic.name for topic in TASKS.values()}


def problems(world: World) -> Iterator[str]:
    """What differs."""
    yield from _rows(world)
    for topic in (REWARDS, REPLAY):
        yield from _repeats(world, topic)
    yield from _statistics(world)
    yield from _sources(world)
    yield from _weights(world)


def _rows(world: World) -> Iterator[str]:
    """The store holds the rows of every record that can be decoded, and no others."""
    store = world.outside.store
    writer = ChunkWriter(None, log=world.broker.cluster_id)
    bus = world.bus(world.config)
    wanted: dict[str, set[str]] = defaultdict(set)
    for topic in ALL:
        for partition in range(world.broker.partitions(topic.name)):
            records = tuple(world.broker.log(topic.name, partition))
            chunk = Chunk(topic=topic.name, partition=partition, records=records)
            for table, rows in writer.convert(chunk, bus.decode).tables.items():
                wanted[table].update(map(repr, rows))
    for table in sorted(COLUMNS.keys() - {"ingested"}):
        held = {repr(row) for _, rows in store.blocks[table] for row in rows}
        if lost := wanted[table] - held:
            yield f"{table}: {len(lost)} rows of the log are not in the store"
        if strange := held - wanted[table]:
            yield f"{table}: {len(strange)} rows in the store are not of the log"


def _repeats(world: World, topic: Topic) -> Iterator[str]:
    """What a processor says again has the same bytes."""
    said: dict[str, bytes] = {}
    for event in events(world, topic):
        assert isinstance(event, events_pb2.ScoredTrajectory | events_pb2.TrainingGroup)
        data = event.SerializeToString(deterministic=True)
        if said.setdefault(event.header.event_id, data) != data:
            yield f"{topic.name}: {event.group_id} was told twice, differently"


def _statistics(world: World) -> Iterator[str]:
    """The n-th valid sample of a domain in a partition was scored with the statistic of n before it."""
    for partition in range(world.broker.partitions(REWARDS.name)):
        counts: Counter[str] = Counter()
        seen = set()
        for record in world.broker.log(REWARDS.name, partition):
            scored = decoded(REWARDS, record)
            if not isinstance(scored, events_pb2.ScoredTrajectory):
                continue
            if scored.header.event_id in seen or scored.validity != events_pb2.VALIDITY_VALID:
                continue
            seen.add(scored.header.event_id)
            if scored.normaliser.count != counts[scored.domain]:
                yield (
                    f"{scored.rollout_id} was scored with a statistic of {scored.normaliser.count}"
                    f" samples, not {counts[scored.domain]}"
                )
                return
            counts[scored.domain] += 1


def _sources(world: World) -> Iterator[str]:
    """No task of a source was passed over: those that were produced are its first ones. A kill may
    cut the last batch, and where no task is wanted any more nobody makes it whole.
    """
    found: dict[str, dict[tuple[int, int], int]] = defaultdict(dict)
    for topic in TASKS.values():
        for task in [*events(world, topic), *damaged(world, topic)]:
            place, at = (task.epoch, task.index), task.header.occurred_at.ToNanoseconds()
            found[task.source][place] = min(at, found[task.source].get(place, at))
    for source, places in found.items():
        whole = 0
        while (0, whole) in places:
            whole += 1
        later = [at for place, at in places.items() if place > (0, whole)]
        if later and max(later) - min(later) > _BATCH_NS:
            yield f"{source}: tasks were passed over: {sorted(places)}"


def _weights(world: World) -> Iterator[str]:
    """The weights are those of one trainer that did the steps that were told, and was never interrupted."""
    groups = {g.group_id: g for g in events(world, REPLAY)}
    steps = {s.step: s for s in events(world, TRAINING_STEPS) if _did(s)}
    last = CheckpointStore(world.folder / "checkpoints", keep=1).latest()
    if last is None or sorted(steps) != list(range(1, last.state.step + 1)):
        yield f"steps {sorted(steps)} were told, {last and last.state.step} are in the checkpoint"
        return
    dice = torch.Generator().manual_seed(world.config.run.seed)
    weights = b"start"
    for _, step in sorted(steps.items()):
        digest = hashlib.sha256(weights)
        for use in step.samples:
            group = groups[use.group_id]
            sample = next(
                s
                for s in group.samples
                if (s.rollout_id, s.segment) == (use.rollout_id, use.segment)
            )
            digest.update(codecs.token_array(sample.tokens).tobytes())
            digest.update(struct.pack("<d", sample.advantage * group.loss_weight))
        digest.update(torch.rand(1, generator=dice).numpy().tobytes())
        weights = digest.digest()
    if (last.policy / "weights").read_bytes() != weights:
        yield "the weights are not those of an uninterrupted run over the same steps"


def _did(step: events_pb2.TrainingStep) -> bool:
    """Whether it is a step and no refusal."""
    return not any(use.drop_reason for use in step.samples)


class Offers:
    """Groups on their way from the producers to the trainer, as the log tells them.

    The limit: one that begins now is to be trained on at most ``max_staleness`` versions later.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        rl = world.config.rl
        assert rl is not None
        self._limit = (rl.max_staleness + 1) * rl.groups_per_step
        self._sizes: dict[str, int] = {}
        self._gone: set[str] = set()
        self._lost: dict[str, set[str]] = defaultdict(set)

    def on_append(self, name: str, record: Record) -> None:
        """A record was written."""
        if name in _TASKS:
            self._on_task(name, record)
        elif name == REPLAY.name:
            group = decoded(REPLAY, record)
            if not isinstance(group, events_pb2.TrainingGroup):
                self._gone.add(record.key.decode("utf-8", "replace"))
            elif group.drop_reason or all(s.drop_reason for s in group.samples):
                self._gone.add(group.group_id)
        elif name == TRAINING_STEPS.name:
            step = events_pb2.TrainingStep.FromString(record.value)
            self._gone.update(use.group_id for use in step.samples)
        elif name == DEAD_LETTERS.name:
            self._on_letter(events_pb2.DeadLetter.FromString(record.value))

    def _on_task(self, name: str, record: Record) -> None:
        value = self._world.broker.damaged.get((name, record.key), record.value)
        task = events_pb2.Task()
        with contextlib.suppress(ContractError):
            found = codecs.decode(next(t for t in TASKS.values() if t.name == name), value)
            assert isinstance(found, events_pb2.Task)
            task = found
        if not task.group_id or task.group_id in self._sizes:
            return
        self._sizes[task.group_id] = task.group_size
        on_their_way = len(self._sizes.keys() - self._gone)
        if on_their_way > self._limit:
            self._world.violated(f"{on_their_way} groups are offered, {self._limit} are usable")

    def _on_letter(self, letter: events_pb2.DeadLetter) -> None:
        group = ids.group_id(letter.task_id)
        self._lost[group].add(letter.rollout_id)
        if not letter.rollout_id or len(self._lost[group]) >= self._sizes.get(group, 0):
            self._gone.add(group)
