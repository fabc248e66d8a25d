"""The service that offers tasks: drawn by domain weight, paced by the staleness bound.

What it waits for: room in the pipeline, which closed groups (``replay``) and used groups
(``training.steps``) make; the baseline evaluation, if the run wants one; the wish to stop.

Failure: state is never kept. On start it reads its own tasks and the control topics from the
beginning and goes on after the last task; a task sent twice has the same id both times.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping

import structlog

from environments.base import RejectedTask
from environments.registry import make
from environments.tasks import topic_of, training_task
from producers.pacing import Pace, Progress, allowance
from producers.sampler import DomainCursor, Drawn, Sampler
from rollstream import lifecycle
from rollstream.bus import Consumer, Producer, Record, connect
from rollstream.bus.deadletters import dead_letter, send_dead_letter
from rollstream.errors import ContractError
from rollstream.lifecycle import Service, ServiceContext
from rollstream.telemetry import tracer
from rollstream.topics import (
    EVALUATIONS,
    POLICY_VERSIONS,
    REPLAY,
    TASKS,
    TRAINING_STEPS,
)
from rollstream.v1 import events_pb2

log = structlog.get_logger(__name__)

_BATCH = 32
_POLL_S = 0.2
_CONTROL = (REPLAY, TRAINING_STEPS, POLICY_VERSIONS, EVALUATIONS)


class Producers(Service):
    """Offers tasks to the rollout workers, as many as the trainer can use in time."""

    name = "producers"

    def __init__(self, context: ServiceContext) -> None:
        super().__init__(context)
        cursors = [DomainCursor(config=d, environment=make(d)) for d in self.config.domains]
        self._sampler = Sampler(cursors, run_id=self.config.run.id, seed=self.config.run.seed)
        self._progress = Progress()
        self._bus = connect(self.config)
        self._ready = False
        rl = self.config.rl
        limit = self.config.producers.max_groups_in_flight
        usable = (rl.max_staleness + 1) * rl.groups_per_step if rl else limit
        self._pace = Pace(usable=usable, open=limit)

    def ready(self) -> bool:
        return self._ready

    def stats(self) -> Mapping[str, float]:
        progress = self._progress
        return {
            "tasks_produced": len(progress.produced),
            "groups_in_flight": len(progress.produced - progress.closed),
            "allowed": allowance(progress, self._pace),
            "domains_parked": sum(bool(c.parked) for c in self._sampler.cursors),
            "paused": float(not self._may_produce()),
        }

    async def run(self) -> None:
        producer = self._bus.producer(client_id="producers")
        control = self._bus.consumer(_CONTROL, client_id="producers-control")
        await producer.start()
        await control.start()
        try:
            await self._read_back()
            await self._catch_up(control)
            self._ready = True
            while not self.context.stopping.is_set():
                if not self._may_produce() or not await self._produce(producer):
                    self._absorb(await control.poll(timeout_s=_POLL_S))
                else:
                    self._absorb(await control.poll(timeout_s=0.0))
        finally:
            await control.stop()
            await producer.stop()

    def _may_produce(self) -> bool:
        settings = self.config.producers
        if settings.wait_for_baseline and not self._progress.baseline_evaluated:
            return False
        if settings.max_tasks and len(self._progress.produced) >= settings.max_tasks:
            return False
        return allowance(self._progress, self._pace) > 0

    async def _produce(self, producer: Producer) -> int:
        """Send up to one batch of tasks; returns how many."""
        count = min(_BATCH, allowance(self._progress, self._pace))
        if limit := self.config.producers.max_tasks:
            count = min(count, limit - len(self._progress.produced))
        deliveries = []
        for _ in range(count):
            drawn = self._sampler.draw()
            if drawn is None:
                break
            if isinstance(drawn.item, RejectedTask):
                await self._reject(producer, drawn.item)
                continue
            deliveries.append(await self._send(producer, drawn))
        await asyncio.gather(*deliveries)
        return count if deliveries else 0

    async def _send(self, producer: Producer, drawn: Drawn) -> asyncio.Future[object]:
        assert not isinstance(drawn.item, RejectedTask)
        domain = drawn.cursor.config
        task = training_task(drawn.cursor.environment, domain, drawn.item, drawn.origin)
        with tracer.start_as_current_span(
            "task",
            attributes={"rollstream.task_id": task.task_id, "rollstream.domain": domain.name},
        ):
            future = await producer.send(topic_of(domain), task, key=task.task_id)
        self._progress.produced.add(task.group_id)
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
        topics = list(TASKS.values())
        ends = {(t.name, p): e for t in topics for p, e in (await self._bus.end_offsets(t)).items()}
        consumer = self._bus.consumer(topics, client_id="producers-read-back")
        await consumer.start()
        try:
            cursors = {c.config.name: c for c in self._sampler.cursors}
            left = {at for at, end in ends.items() if end}
            while left and not self.context.stopping.is_set():
                for record in await consumer.poll(max_records=2000):
                    self._remember(record, cursors)
                    if record.offset + 1 >= ends[record.topic, record.partition]:
                        left.discard((record.topic, record.partition))
        finally:
            await consumer.stop()
        self._sampler.drawn = len(self._progress.produced)

    def _remember(self, record: Record, cursors: Mapping[str, DomainCursor]) -> None:
        try:
            task = self._bus.decode(record)
        except ContractError:
            return  # the rollout workers put it into the dead letters
        assert isinstance(task, events_pb2.Task)
        if task.purpose == events_pb2.PURPOSE_TRAIN and task.header.run_id == self.config.run.id:
            self._progress.produced.add(task.group_id)
            if task.domain in cursors:
                cursors[task.domain].seek(index=task.index, epoch=task.epoch)

    async def _catch_up(self, control: Consumer) -> None:
        """Read the control topics up to where they end now."""
        behind = True
        while behind and not self.context.stopping.is_set():
            self._absorb(await control.poll(max_records=2000, timeout_s=_POLL_S))
            behind = any(p.position < p.end for p in await control.positions())

    def _absorb(self, records: list[Record]) -> None:
        for record in records:
            try:
                event = self._bus.decode(record)
            except ContractError as error:
                log.error("control event ignored", topic=record.topic, error=str(error))
                continue
            if record.topic == REPLAY.name:
                self._progress.on_group(event)  # type: ignore[arg-type]
            elif record.topic == TRAINING_STEPS.name:
                self._progress.on_step(event)  # type: ignore[arg-type]
            elif record.topic == POLICY_VERSIONS.name:
                self._progress.final |= event.final  # type: ignore[attr-defined]
            else:
                self._progress.baseline_evaluated |= (
                    event.baseline and not event.task_id  # type: ignore[attr-defined]
                )


if __name__ == "__main__":
    sys.exit(lifecycle.main(Producers))
