"""The service that trains: stages in order, versions published, every sample accounted for.

Order of one step, which is what makes it exact: take groups from the buffer, step, write the
checkpoint (weights, optimiser, log positions, buffer, and the records due), and only then emit the
records and publish the version. A crash before the checkpoint repeats the step from the log; a
crash after it emits the same records again under the same ids. What a refusal depends on (the
version) is made durable before the refusal is recorded, so that a repeat refuses the same groups.

After the last stage it goes on reading ``replay`` and records what it will not train on any more as
``run_complete``, until it is told to stop.

| task | waits for | unblocked by |
|---|---|---|
| main loop | groups on ``replay`` | processors; the wish to stop |
| compute thread | work of the main loop | the main loop |
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import structlog

from rollstream import lifecycle
from rollstream.bus import Consumer, Producer, Record
from rollstream.bus.deadletters import send_dead_letter
from rollstream.config.model import RlStage, SftStage, Stage
from rollstream.errors import ConfigError, ContractError
from rollstream.lifecycle import Service, ServiceContext
from rollstream.telemetry import tracer
from rollstream.topics import POLICY_VERSIONS, REPLAY, TRAINING_STEPS
from rollstream.v1 import events_pb2
from trainer.buffer import Refusal
from trainer.letters import letter_of
from trainer.ordering import LogOrder

if TYPE_CHECKING:
    from trainer.checkpoint import Checkpoint
    from trainer.session import TrainerSession

log = structlog.get_logger(__name__)
T = TypeVar("T")

# Groups read at once, as a multiple of what a step needs: bounds the memory of the buffer.
_PREFETCH_STEPS = 4
# Read at once when nothing is trained any more.
_DRAIN_GROUPS = 64
_POLL_S = 0.2
# Asking for the ends of the log is a round trip to the broker.
_LAG_EVERY_S = 1.0
# Reasons to refuse a group that are no sign of something wrong upstream.
_USUAL = frozenset({"stale", "run_complete"})


class Trainer(Service):
    """Trains the policy on what ``replay`` brings."""

    name = "trainer"

    def __init__(self, context: ServiceContext) -> None:
        super().__init__(context)
        _check_stages(self.config.trainer.stages)
        self._bus = context.connect(self.config)
        # One thread: compute is single-threaded, and torch's state stays in one place.
        self._compute = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")
        self._session: TrainerSession | None = None
        self._dropped: Counter[str] = Counter()
        self._lag_records = 0.0
        self._lag_asked = -_LAG_EVERY_S

    def ready(self) -> bool:
        return self._session is not None

    def stats(self) -> Mapping[str, float]:
        session = self._session
        if session is None:
            return {}
        state, stages = session.state, self.config.trainer.stages
        return {
            **session.progress,
            "stage": state.stage,
            "step": state.step,
            "steps_total": sum(s.steps for s in stages if isinstance(s, RlStage)),
            "policy_version": state.version,
            "samples_trained": state.samples_trained,
            "groups_buffered": len(session.buffer),
            "duplicates": session.buffer.duplicates,
            "lag_records": self._lag_records,
            **{f"samples_dropped_{reason}": n for reason, n in self._dropped.items()},
        }

    async def run(self) -> None:
        session = self._make_session()
        producer = self._bus.producer(client_id="trainer")
        consumer = self._bus.consumer([REPLAY], client_id="trainer")
        try:
            await producer.start()
            await consumer.start()
            checkpoint = await self._in_thread(session.open)
            self._order = LogOrder(range(await self._bus.partitions(REPLAY)))
            self._session = session
            if checkpoint is not None:
                await self._emit(producer, checkpoint)
            for partition, offset in session.buffer.positions.items():
                consumer.seek(REPLAY, partition, offset)
            await self._stages(session, producer, consumer)
            await self._save(session, producer)
            await self._drain(session, producer, consumer)
        finally:
            self._compute.shutdown(wait=True)
            await consumer.stop()
            await producer.stop()

    def _make_session(self) -> TrainerSession:
        from trainer.session import TrainerSession

        return TrainerSession(self.config)

    async def _stages(
        self, session: TrainerSession, producer: Producer, consumer: Consumer
    ) -> None:
        while not self.context.stopping.is_set() and (stage := session.stage) is not None:
            if isinstance(stage, SftStage):
                checkpoint = await self._in_thread(
                    partial(session.warm_up, stage, self.context.stopping.is_set)
                )
                if checkpoint is not None:
                    await self._emit(producer, checkpoint)
            else:
                if session.state.version < 0:
                    await self._emit(producer, await self._in_thread(session.publish_baseline))
                await self._rl_step(session, stage, producer, consumer)

    async def _rl_step(
        self, session: TrainerSession, stage: RlStage, producer: Producer, consumer: Consumer
    ) -> None:
        """Read until a batch is there, and train on it; returns early when told to stop."""
        waited = time.monotonic()
        while not self.context.stopping.is_set():
            version = session.state.version
            stale = session.buffer.expire(version=version, max_staleness=stage.max_staleness)
            await self._refuse(session, producer, stale)
            groups = session.buffer.take(stage.groups_per_step)
            if groups is not None:
                break
            await self._read(session, producer, consumer)
        else:
            return
        wait_s = time.monotonic() - waited
        with tracer.start_as_current_span("optimiser step"):
            work = partial(session.step, stage, groups, wait_s=wait_s)
            checkpoint = await self._in_thread(work)
            if checkpoint is not None:
                await self._emit(producer, checkpoint)
        shown = ("reward_mean", "loss", "staleness_max", "wait_s", "compute_s")
        numbers = {name: round(session.progress.get(name, 0.0), 4) for name in shown}
        log.info("step", step=session.state.step, **numbers)

    async def _read(self, session: TrainerSession, producer: Producer, consumer: Consumer) -> None:
        """Take in what is on ``replay``; refused groups are recorded at once."""
        stage = session.stage
        room = _DRAIN_GROUPS
        if isinstance(stage, RlStage):
            room = _PREFETCH_STEPS * stage.groups_per_step
        refusals: list[Refusal] = []
        for record in await self._next(consumer, room):
            group = await self._decode(record, producer)
            if group is None:
                continue
            refusal = session.buffer.offer(group, partition=record.partition, offset=record.offset)
            if refusal is not None:
                refusals.append(refusal)
        await self._refuse(session, producer, refusals)
        if time.monotonic() - self._lag_asked >= _LAG_EVERY_S:
            self._lag_records = sum(p.end - p.position for p in await consumer.positions())
            self._lag_asked = time.monotonic()

    async def _next(self, consumer: Consumer, room: int) -> list[Record]:
        """The next records in the order of the log (``trainer.ordering``)."""
        self._order.add(await consumer.poll(max_records=room, timeout_s=_POLL_S))
        if self._order.blocked:
            at = await consumer.positions()
            self._order.at_end(p.partition for p in at if p.position >= p.end)
        return self._order.take()

    async def _decode(self, record: Record, producer: Producer) -> events_pb2.TrainingGroup | None:
        try:
            event = self._bus.decode(record)
        except ContractError as error:
            log.error("group is broken", offset=record.offset, error=str(error))
            letter = letter_of(record, error, run_id=self.config.run.id)
            await send_dead_letter(producer, letter)
            return None
        assert isinstance(event, events_pb2.TrainingGroup)
        return event

    async def _drain(self, session: TrainerSession, producer: Producer, consumer: Consumer) -> None:
        """All stages are done: account for what still comes, until told to stop."""
        if session.stage is not None:
            return
        await self._refuse(session, producer, session.buffer.drain())
        while not self.context.stopping.is_set():
            await self._read(session, producer, consumer)
            await self._refuse(session, producer, session.buffer.drain())

    async def _refuse(
        self, session: TrainerSession, producer: Producer, refusals: list[Refusal]
    ) -> None:
        from trainer.records import refusal_event

        if not refusals:
            return
        await self._save(session, producer)
        state, stage = session.state, session.stage
        name = stage.name if stage else ""
        events = [
            refusal_event(self.config, r, step=state.step, stage=name, version=state.version)
            for r in refusals
        ]
        await producer.send_batch(TRAINING_STEPS, [(self.config.run.id, e) for e in events])
        for refusal, event in zip(refusals, events, strict=True):
            self._dropped[refusal.reason] += len(event.samples)
            if refusal.reason not in _USUAL:
                log.error("group refused", group=refusal.group.group_id, reason=refusal.reason)

    async def _save(self, session: TrainerSession, producer: Producer) -> None:
        """Make durable, and emit, what was done since the last checkpoint."""
        if session.unsaved:
            await self._emit(producer, await self._in_thread(session.save))

    async def _emit(self, producer: Producer, checkpoint: Checkpoint) -> None:
        """Emit what a durable checkpoint makes true: step records, then the version."""
        from trainer.records import version_event

        state = checkpoint.state
        records = [events_pb2.TrainingStep.FromString(bytes.fromhex(e)) for e in state.events]
        await producer.send_batch(TRAINING_STEPS, [(self.config.run.id, e) for e in records])
        if not state.publish:
            return
        # In the thread: it reads all the weights for their digests.
        announce = partial(
            version_event,
            self.config,
            checkpoint.policy,
            version=state.version,
            step=state.step,
            stage=state.made_by,
            baseline=state.baseline,
            final=state.final,
        )
        event = await self._in_thread(announce)
        await producer.send_batch(POLICY_VERSIONS, [(self.config.policy.name, event)])
        log.info("published", version=state.version, final=state.final)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._compute, work)


def _check_stages(stages: Sequence[Stage]) -> None:
    if not stages:
        raise ConfigError(
            "trainer.stages is empty: there is nothing to train",
            hint='add [[trainer.stages]] with kind = "sft" or "rl"',
        )
    for stage in stages:
        if isinstance(stage, RlStage) and stage.kl_coefficient > 0:
            raise ConfigError(
                f"stage {stage.name!r}: kl_coefficient={stage.kl_coefficient} needs a"
                " reference model, which this trainer does not have",
                hint="set it to 0",
            )


if __name__ == "__main__":
    sys.exit(lifecycle.main(Trainer))
