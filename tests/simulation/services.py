"""The services as the simulation runs them: their own code, with what is outside of them replaced.

| service | its own | replaced |
|---|---|---|
| producers | all | the domain's data |
| rollouts | all, the agent loop included | engine (its tokens are functions of rollout, attempt and version) |
| trainer | all but the arithmetic of a step | model and optimiser: a digest of everything that was trained on |
| sink | all | ClickHouse (``store.py``) |
| processors | pipeline, batches, order of effects, letters | Faust (below) |

Faust is stood in for by a consumer of the group, tables in memory that are read back from their changelogs at each
assignment, and commits of what was acknowledged.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from environments.base import Environment, SandboxSession, TaskSpec
from environments.demo_arithmetic import DemoArithmetic
from processors.batch import Batch, Change, WriteBack
from processors.letters import letter_of
from processors.pipeline import Emission, Origin, Pipeline
from rollouts.engines.base import (
    EngineBrokenError,
    GenerateRequest,
    Generation,
    InferenceEngine,
    token_limit,
)
from rollouts.main import Rollouts
from rollstream import codecs
from rollstream.bus import Record
from rollstream.bus.deadletters import send_dead_letter
from rollstream.errors import InfraError
from rollstream.lifecycle import Service, ServiceContext
from rollstream.testing import MemoryBus
from rollstream.testing.memory_bus import MemoryConsumer, MemoryProducer
from rollstream.topics import TRAJECTORIES, Cleanup, Topic
from rollstream.v1 import events_pb2
from tests.simulation.kernel import Loop
from tests.simulation.store import Store, StoreClient
from trainer.buffer import live_samples
from trainer.checkpoint import Checkpoint
from trainer.learner import SequenceStats, StepResult
from trainer.main import Trainer
from trainer.packing import TrainSequence
from trainer.session import TrainerSession
from trajectories.sink_main import Sink
from trajectories.writer import ChunkWriter

TICKS = Topic(name="processors-ticks", message=events_pb2.Task, key="group_id")
CHANGELOGS = tuple(
    Topic(
        name=f"processors-{table}-changelog",
        message=events_pb2.Task,
        key="key",
        cleanup=Cleanup.COMPACT,
    )
    for table in ("groups", "normalisers")
)
INTERNAL = (TICKS, *CHANGELOGS)
_TICK = struct.Struct("<d")
# On either side of a group's deadline.
_HANG_S = (5.0, 40.0)


@dataclass(slots=True)
class Outside:
    """What the services share beside the bus, and what is noted of them while they run."""

    loop: Loop
    store: Store
    bus: Callable[[Any], MemoryBus]
    # Share of the generations that fail, and of those that break the engine.
    engine_failing: float = 0.0
    engine_breaking: float = 0.0
    # Share of those that take ``_HANG_S`` longer.
    engine_hanging: float = 0.0
    disk_full: bool = False
    generate_s: tuple[float, float] = (0.05, 1.0)
    # Violations that are seen when they happen.
    seen: list[str] = field(default_factory=list)
    # Group ids of each step, as the trainer began it: (lineage of one life, step) is not unique.
    batches: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)


# -- environment and engine


class Simulated(Environment):
    """Endless tasks; the answer is judged by a hash, so that half of them are right."""

    @property
    def source(self) -> str:
        return "simulated/1"

    def tasks(self, *, seed: int, split: str, start: int = 0) -> Iterator[TaskSpec]:
        index = start
        while True:
            prompt = codecs.text_message(events_pb2.ROLE_USER, f"{seed % 10}+{index}")
            yield TaskSpec(prompt=(prompt,), verifier={"index": index}, difficulty=0.0)
            index += 1

    async def verify(
        self,
        session: SandboxSession | None,
        verifier: Mapping[str, Any],
        turns: Sequence[events_pb2.Turn],
    ) -> events_pb2.Evidence:
        said = turns[-1].assistant.SerializeToString(deterministic=True) if turns else b""
        value = hashlib.blake2b(said).digest()[0] % 3 / 2
        return events_pb2.Evidence(
            validity=events_pb2.VALIDITY_VALID,
            items=[events_pb2.EvidenceItem(name="correct", value=value)],
        )


class Engine(InferenceEngine):
    """Says a word that depends on the rollout, after a while; weights may change on the way."""

    def __init__(self, outside: Outside) -> None:
        self._outside = outside
        self._version = -1

    async def start(self, model_dir: Path, *, version: int) -> None:
        await self.update_weights(model_dir, version=version)

    async def generate(self, request: GenerateRequest) -> Generation:
        rng, outside = self._outside.loop.rng, self._outside
        draw = rng.random()
        begun = self._version
        await asyncio.sleep(rng.uniform(*outside.generate_s))
        if rng.random() < outside.engine_hanging:
            await asyncio.sleep(rng.uniform(*_HANG_S))
        if draw < outside.engine_breaking:
            raise EngineBrokenError("the engine is broken")
        if draw < outside.engine_breaking + outside.engine_failing:
            raise InfraError("the engine lost a request")
        count = token_limit(request, window=64) if request.max_tokens < 3 else 3
        ids = np.full(count, request.stop_ids[0], dtype=np.int32)
        ids[:-1] = rng.choices(range(8, 18), k=count - 1)
        spans = ((begun, 0, 1), (self._version, 1, count - 1))
        whole = ((begun, 0, count),)
        return Generation(
            token_ids=ids,
            logprobs=np.full(count, -0.5, dtype=np.float32),
            versions=whole if begun == self._version else spans,
            finish_reason=events_pb2.FINISH_REASON_STOP,
        )

    async def update_weights(self, model_dir: Path, *, version: int) -> None:
        if not (model_dir / "weights").exists():
            raise InfraError(f"{model_dir} is gone")
        await asyncio.sleep(self._outside.loop.rng.uniform(0.0, 0.3))
        self._version = version

    @property
    def version(self) -> int:
        return self._version

    def stats(self) -> Mapping[str, float]:
        return {}

    async def stop(self) -> None: ...


class SimulatedRollouts(Rollouts):
    outside: Outside

    def __init__(self, context: ServiceContext) -> None:
        super().__init__(context)
        # The pid would be another one each time.
        self._worker_id = context.config.run.dir.name

    def _make_engine(self) -> InferenceEngine:
        return Engine(self.outside)


# -- trainer


@cache
def _tokenizer() -> dict[str, bytes]:
    return dict(DemoArithmetic().tokenizer())


class Learner:
    """In place of the arithmetic: the weights are a digest of all that was trained on, in order."""

    def __init__(self, weights: bytes) -> None:
        self.weights = weights
        self.optimiser: Any = None

    def begin_stage(self, settings: Any) -> None:
        self.optimiser = settings

    def rl_step(
        self, sequences: Sequence[TrainSequence], *, lr: float, tis_clip: float
    ) -> StepResult:
        digest = hashlib.sha256(self.weights)
        for sequence in sequences:
            digest.update(sequence.token_ids.tobytes())
            digest.update(struct.pack("<d", sequence.advantage))
        # The random state counts as well.
        digest.update(torch.rand(1).numpy().tobytes())
        self.weights = digest.digest()
        ones = np.ones(len(sequences))
        return StepResult(
            applied=True,
            metrics={"loss": 0.0},
            sequences=SequenceStats(
                tokens=np.array([len(s.token_ids) for s in sequences]),
                ratio_mean=ones,
                ratio_max=ones,
                clip_fraction=ones * 0,
                loss=ones * 0,
            ),
        )


def _age(group: events_pb2.TrainingGroup, version: int) -> int:
    return version - min(sample.policy_version_min for sample in live_samples(group))


class Session(TrainerSession):
    """The trainer's session without a model."""

    def __init__(self, config: Any, outside: Outside) -> None:
        super().__init__(config)
        self._outside = outside

    def _load(self, checkpoint: Checkpoint | None) -> Any:
        self.buffer.vocab_size = 64
        torch.manual_seed(self.config.run.seed)
        if checkpoint is None:
            return Learner(b"start")
        return Learner((checkpoint.policy / "weights").read_bytes())

    def step(self, stage: Any, groups: Any, *, wait_s: float = 0.0) -> Checkpoint | None:
        bound, version = stage.max_staleness, self.state.version
        late = [g.group_id for g in groups if _age(g, version) > bound]
        if late:
            self._outside.seen.append(f"step at version {version} trains on stale {late}")
        batch = (self.state.step + 1, tuple(g.group_id for g in groups))
        self._outside.batches.append(batch)
        return super().step(stage, groups, wait_s=wait_s)

    def _tensors(self) -> dict[str, Any]:
        return {"optimiser": {}, "weights": {}, "rng": torch.get_rng_state()}

    def _write_policy(self, folder: Path) -> None:
        folder.mkdir()
        for name, data in _tokenizer().items():
            (folder / name).write_bytes(data)
        self._outside.loop.effect()
        (folder / "weights").write_bytes(self._learner.weights)  # type: ignore[attr-defined]


class SimulatedTrainer(Trainer):
    outside: Outside

    def _make_session(self) -> TrainerSession:
        return Session(self.config, self.outside)


# -- sink


class SimulatedSink(Sink):
    outside: Outside

    def _open_store(self, log_id: str) -> ChunkWriter:
        return ChunkWriter(StoreClient(self.outside.store), log=log_id)


# -- processors


class _Batch(Batch[Record]):
    def __init__(self, service: SimulatedProcessors) -> None:
        self.tables = service.changes
        self._service = service

    def partition(self, event: Record) -> int:
        return event.partition

    def apply(self, event: Record) -> list[Emission]:
        service = self._service
        if event.topic == TICKS.name:
            (now_s,) = _TICK.unpack(event.value)
            return service.pipeline.on_tick(event.key, now_s, partition=event.partition)
        trajectory = service.bus.decode(event)
        assert isinstance(trajectory, events_pb2.Trajectory)
        origin = Origin(partition=event.partition, offset=event.offset)
        return service.pipeline.on_trajectory(trajectory, origin)

    async def bury(self, event: Record, error: Exception) -> None:
        letter = letter_of(event, error, run_id=self._service.config.run.id)
        await send_dead_letter(self._service.producer, letter)

    async def send(self, emission: Emission) -> asyncio.Future[object]:
        topic, key, message = emission
        return await self._service.producer.send(topic, message, key=key)

    async def write(self, table: int, changes: Mapping[bytes, Change]) -> None:
        target, deliveries = self._service.tables[table], []
        for key, (partition, value) in changes.items():
            if value is None:
                target.pop(key, None)
            else:
                target[key] = value
            deliveries.append(
                await self._service.producer.send_bytes(
                    CHANGELOGS[table], key, value or b"", partition=partition
                )
            )
        for delivery in deliveries:
            await delivery

    async def acknowledge(self, event: Record) -> None:
        self._service.consumer.done(event)


class SimulatedProcessors(Service):
    """Scores, normalises and groups, without Faust."""

    name = "processors"
    outside: Outside

    def __init__(self, context: ServiceContext) -> None:
        super().__init__(context)
        self.bus: MemoryBus = self.outside.bus(self.config)
        self.producer: MemoryProducer = self.bus.producer(client_id="processors")
        self.consumer: MemoryConsumer = self.bus.consumer(
            [TRAJECTORIES, TICKS], client_id="processors", group_id="processors"
        )
        self.tables: list[dict[bytes, bytes]] = [{}, {}]
        self.changes = [WriteBack(table) for table in self.tables]
        self.pipeline = Pipeline(self.config, groups=self.changes[0], normalisers=self.changes[1])
        self._generation = -1

    async def run(self) -> None:
        await self.producer.start()
        await self.consumer.start()
        committing = asyncio.create_task(self._commit(), name="commit")
        ticked = time.monotonic()
        while not self.context.stopping.is_set():
            records = await self.consumer.poll(max_records=16, timeout_s=0.5)
            generation = self.consumer.generation
            if generation != self._generation:
                await self._recover()
            # What was fetched before another rebalance comes again, perhaps elsewhere.
            if records and generation == self._generation:
                await _Batch(self).work_through(records)
            now = time.monotonic()
            if now - ticked >= 1.0:
                await self._tick()
                ticked = now
        committing.cancel()
        await asyncio.gather(committing, return_exceptions=True)
        await self.consumer.stop()
        await self.producer.stop()

    async def _commit(self) -> None:
        """What was acknowledged, at any time, as Faust does it: also in the middle of a batch."""
        while True:
            await asyncio.sleep(self.config.processors.commit_interval_s)
            with contextlib.suppress(InfraError):
                await self.consumer.commit()

    async def _recover(self) -> None:
        """The tables of the partitions that this worker has now, from their changelogs."""
        while True:
            generation = self.consumer.generation
            mine = sorted(p for name, p in self.consumer.assignment() if name == TRAJECTORIES.name)
            for table, topic in zip(self.tables, CHANGELOGS, strict=True):
                table.clear()
                name = self.bus.full_name(topic)
                for partition in mine:
                    for record in await self.bus.call("recovery", self._reading(name, partition)):
                        if record.value:
                            table[record.key] = record.value
                        else:
                            table.pop(record.key, None)
            if generation == self.consumer.generation:
                break
        self._generation = generation
        self.pipeline.recover(self.tables[0])

    def _reading(self, name: str, partition: int) -> Callable[[], list[Record]]:
        return lambda: list(self.bus.broker.log(name, partition))

    async def _tick(self) -> None:
        now_s = time.time()
        for key, partition in self.pipeline.due(now_s):
            delivery = await self.producer.send_bytes(
                TICKS, key, _TICK.pack(now_s), partition=partition
            )
            await delivery
