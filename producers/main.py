"""The service that offers tasks: drawn by domain weight, paced by the staleness bound.

Failure: state is never kept. On start it reads its own tasks and the control topics from the
beginning and goes on where it was; a task sent twice has the same id both times. What is no task (a
malformed line) becomes a dead letter before anything that follows it is sent.

| task | waits for | unblocked by |
|---|---|---|
| main loop | room in the pipeline | closed groups (``replay``), used groups (``training.steps``), |
|  |  | what was given up (``dead-letters``) |
|  | the baseline, if the run wants one | ``evaluations`` |
|  | acknowledgement of a batch | the broker, within ``bus.retry_budget_s`` |
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence

import structlog

from environments.base import RejectedTask, TaskSpec
from environments.registry import make
from environments.tasks import TaskOrigin, topic_of, training_task
from producers.history import History
from producers.pacing import Pace, Progress, allowance
from producers.sampler import DomainCursor, Drawn, Sampler
from rollstream import ids, lifecycle
from rollstream.bus import Consumer, Producer, Record
from rollstream.bus.deadletters import dead_letter, send_dead_letter
from rollstream.config import Config
from rollstream.errors import ConfigError, ContractError
from rollstream.lifecycle import Service, ServiceContext
from rollstream.telemetry import tracer
from rollstream.topics import (
    DEAD_LETTERS,
    EVALUATIONS,
    POLICY_VERSIONS,
    REPLAY,
    TASKS,
    TRAINING_STEPS,
)
from rollstream.v1 import events_pb2

log = structlog.get_logger(__name__)

# Tasks between two looks at the control topics; no more are ever in flight to the broker.
_BATCH = 32
_POLL_S = 0.2
_READ_RECORDS = 2000
_CONTROL = (REPLAY, TRAINING_STEPS, POLICY_VERSIONS, EVALUATIONS, DEAD_LETTERS)


class Producers(Service):
    """Offers tasks to the rollout workers, as many as the trainer can use in time."""

    name = "producers"

    def __init__(self, context: ServiceContext) -> None:
        super().__init__(context)
        run = self.config.run
        self._pace = pace(self.config)
        cursors = [DomainCursor(config=d, environment=make(d)) for d in self.config.domains]
        self._sampler = Sampler(cursors, run_id=run.id, seed=run.seed)
        self._progress = Progress(run_id=run.id)
        self._bus = context.connect(self.config)
        self._ready = False

    def ready(self) -> bool:
        return self._ready

    def stats(self) -> Mapping[str, float]:
        allowed = allowance(self._progress, self._pace)
        return {
            **self._progress.numbers(),
            "allowed": allowed,
            "domains_parked": sum(bool(c.parked) for c in self._sampler.cursors),
            "paused": float(not allowed),
        }

    async def run(self) -> None:
        producer = self._bus.producer(client_id="producers")
        control = self._bus.consumer(_CONTROL, client_id="producers-control")
        await producer.start()
        try:
            await control.start()
            await self._read_back()
            await self._read_to_end(control, self._absorb)
            self._ready = True
            log.info("producing", **self._progress.numbers())
            while not self.context.stopping.is_set():
                busy = await self._produce(producer)
                self._absorb(await control.poll(timeout_s=0.0 if busy else _POLL_S))
        finally:
            await control.stop()
            await producer.stop()

    async def _produce(self, producer: Producer) -> bool:
        """Send up to one batch of tasks. False when there is nothing to send now."""
        count = min(_BATCH, allowance(self._progress, self._pace))
        deliveries: list[asyncio.Future[object]] = []
        for drawn_now in range(count):
            drawn = self._sampler.draw(len(self._progress.produced))
            if drawn is None:
                count = drawn_now
                break
            if isinstance(drawn.item, RejectedTask):
                await self._reject(producer, drawn.item)
            elif _group_id(drawn.origin) not in self._progress.produced:
                deliveries.append(await self._send(producer, drawn, drawn.item))
        for delivery in deliveries:
            await delivery
        return count > 0

    async def _send(
        self, producer: Producer, drawn: Drawn, spec: TaskSpec
    ) -> asyncio.Future[object]:
        domain = drawn.cursor.config
        task = training_task(drawn.cursor.environment, domain, spec, drawn.origin)
        attributes = {"rollstream.task_id": task.task_id, "rollstream.domain": domain.name}
        # The root of the trace that the sample carries as far as the optimiser step.
        with tracer.start_as_current_span("task", attributes=attributes):
            future = await producer.send(topic_of(domain), task, key=task.task_id)
        self._progress.on_task(task)
        return future

    async def _reject(self, producer: Producer, rejected: RejectedTask) -> None:
        log.warning("task rejected", error=str(rejected.error))
        record = Record(
            topic=rejected.where,
            partition=0,
            offset=rejected.position,
            key=b"",
            value=rejected.raw,
            headers=(),
            timestamp_ms=0,
        )
        letter = dead_letter(record, rejected.error, service=self.name, run_id=self.config.run.id)
        await send_dead_letter(producer, letter)

    async def _read_back(self) -> None:
        """Find out from the tasks topics what an earlier life has produced."""
        history = History(batch=_BATCH)
        consumer = self._bus.consumer(list(TASKS.values()), client_id="producers-read-back")
        await consumer.start()
        try:
            await self._read_to_end(consumer, lambda records: self._recall(records, history))
        finally:
            await consumer.stop()
        for cursor in self._sampler.cursors:
            epoch, index = history.resume_at(self._sampler.source(cursor))
            cursor.seek(index=index, epoch=epoch)

    def _recall(self, records: Sequence[Record], history: History) -> None:
        for record in records:
            try:
                task = self._bus.decode(record)
            except ContractError:
                continue  # the rollout workers put it into the dead letters
            assert isinstance(task, events_pb2.Task)
            ours = task.header.run_id == self.config.run.id
            if ours and task.purpose == events_pb2.PURPOSE_TRAIN and self._progress.on_task(task):
                history.on_task(task)

    async def _read_to_end(self, consumer: Consumer, take: Callable[[list[Record]], None]) -> None:
        """Read what is there now: up to where the topics end."""
        behind = True
        while behind and not self.context.stopping.is_set():
            take(await consumer.poll(max_records=_READ_RECORDS, timeout_s=_POLL_S))
            behind = any(p.position < p.end for p in await consumer.positions())

    def _absorb(self, records: Sequence[Record]) -> None:
        for record in records:
            try:
                self._progress.absorb(self._bus.decode(record))
            except ContractError as error:
                log.error("control event ignored", topic=record.topic, error=str(error))
                if record.topic == REPLAY.name:
                    # The trainer cannot read it either: the group makes room.
                    self._progress.give_up(record.key.decode("utf-8", "replace"))


def pace(config: Config) -> Pace:
    """The limits that a run asks for.

    Raises:
        ConfigError: nothing could ever be produced.
    """
    if not any(domain.weight > 0 for domain in config.domains):
        raise ConfigError(
            f"producers have no domain with a weight above 0 among {len(config.domains)}",
            hint="add a [[domains]] table, or raise its weight",
        )
    settings, rl = config.producers, config.rl
    if settings.wait_for_baseline and not config.evaluation.domains:
        raise ConfigError(
            "producers.wait_for_baseline is true and nothing is evaluated",
            hint="name evaluation.domains, or set producers.wait_for_baseline = false",
        )
    limit = settings.max_groups_in_flight
    return Pace(
        usable=(rl.max_staleness + 1) * rl.groups_per_step if rl else limit,
        open=limit,
        tasks=settings.max_tasks,
        after_baseline=settings.wait_for_baseline,
    )


def _group_id(origin: TaskOrigin) -> str:
    task_id = ids.task_id(origin.run_id, origin.source, origin.index, origin.epoch)
    return ids.group_id(task_id)


if __name__ == "__main__":
    sys.exit(lifecycle.main(Producers))
