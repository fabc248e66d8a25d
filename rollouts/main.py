"""The service that does rollouts: many tasks in flight, each finished before it is acknowledged.

A task's samples run on this worker, so that their prompt is computed once. Each trajectory is sent
when it ends; a record counts as done when all of its task are acknowledged by the broker, and only
the low watermark is committed, so that a crash brings unfinished tasks again: same ids, and readers
drop what they have.

| task | waits for | unblocked by |
|---|---|---|
| main loop | tasks, and room (``max_tasks``) | Kafka, finished tasks |
| ``task-<id>`` | its rollouts | engine, sandbox |
| ``rollout-<id>`` | a slot (``max_rollouts``; evaluation first) | finished rollouts |
| ``policy`` | ``policy.versions`` | the trainer |

Failure: a lost sandbox is tried again up to ``max_attempts`` with a higher attempt, then recorded
as FAILED with INVALID evidence; what no second try can cure is recorded at once. An undecodable
task, or one of an unknown domain, is a dead letter. A broken engine ends the process and writes
nothing off; its tasks come again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import dataclass

import structlog
from google.protobuf.message import DecodeError

from environments.base import Environment
from environments.registry import make
from rollouts.agent import Rollout, RolloutSpec, failed_trajectory
from rollouts.engines.base import EngineBrokenError, InferenceEngine
from rollouts.engines.factory import make_engine
from rollouts.policy import PolicyFollower
from rollouts.slots import PrioritySlots
from rollstream import lifecycle, telemetry
from rollstream.bus import Consumer, Producer, Record
from rollstream.bus.deadletters import dead_letter, send_dead_letter
from rollstream.errors import ConfigError, ContractError, InfraError
from rollstream.lifecycle import Service, ServiceContext
from rollstream.liveness import Progress
from rollstream.telemetry import tracer
from rollstream.topics import TASKS_LONG, TASKS_SHORT, TASKS_STANDARD, TRAJECTORIES
from rollstream.v1 import events_pb2
from sandboxes.client import SandboxClient

log = structlog.get_logger(__name__)

_TIERS = {"short": TASKS_SHORT, "standard": TASKS_STANDARD, "long": TASKS_LONG}
_POLL_S = 0.1
_COMMIT_EVERY_S = 0.5
_LAG_EVERY_S = 2.0
# Of the drain time, for finishing; the rest is for closing sandboxes, commit and engine.
_DRAIN_SHARE = 0.8
# Of a task that is done alone.
_DEATHS = 2
# A group is held in memory at once; no estimator asks for more samples than this.
_MAX_GROUP_SIZE = 4096


class Rollouts(Service):
    """Does rollouts of the tasks of its tiers."""

    name = "rollouts"

    def __init__(self, context: ServiceContext) -> None:
        super().__init__(context)
        self._bus = context.connect(self.config)
        self._environments: dict[str, Environment] = {
            domain.name: make(domain) for domain in self.config.domains
        }
        self._worker_id = f"{socket.gethostname()}-{os.getpid()}"
        settings = self.config.rollouts
        self._slots = PrioritySlots(settings.max_rollouts)
        self._tasks: set[asyncio.Task[None]] = set()
        # Those of them that wait for a policy version and have begun nothing.
        self._held: set[asyncio.Task[None] | None] = set()
        self._fatal: BaseException | None = None
        self._policy: PolicyFollower | None = None
        self._consumer: Consumer | None = None
        self._done = 0
        self._failed = 0
        self._retried = 0
        self._sandbox_wait_s = 0.0
        self._lag_records = 0.0
        self._rate = _Rate()

    def ready(self) -> bool:
        return self._policy is not None

    def stats(self) -> Mapping[str, float]:
        engine = self._engine.stats() if self._policy else {}
        tokens = engine.get("generated_tokens", 0.0)
        return {
            "tasks_in_flight": len(self._tasks),
            "rollouts_in_flight": self._slots.taken,
            "rollouts_done": self._done,
            "rollouts_failed": self._failed,
            "rollouts_retried": self._retried,
            "sandbox_wait_s": self._sandbox_wait_s,
            "policy_version": self._engine.version if self._policy else -1,
            "policy_updates": self._policy.updates_total if self._policy else 0,
            "policy_failures": self._policy.failures_total if self._policy else 0,
            "tokens_per_s": self._rate.per_second(tokens),
            "lag_records": self._lag_records,
            **engine,
        }

    async def progress(self) -> Progress | None:
        """None while every task waits for its policy version: then so does this worker."""
        if self._consumer is None or (self._tasks and self._tasks <= self._held):
            return None
        waiting = sum(at.lag_records for at in await self._consumer.positions())
        tokens = self._engine.stats().get("generated_tokens", 0.0)
        return Progress(waiting=waiting, done=tokens + self._done + self._failed)

    async def run(self) -> None:
        settings = self.config.rollouts
        self._engine = self._make_engine()
        producer = self._bus.producer(client_id="rollouts")
        topics = [_TIERS[tier] for tier in settings.tiers]
        consumer = self._bus.consumer(topics, client_id="rollouts", group_id="rollouts")
        self._policy = PolicyFollower(
            self._bus,
            self._engine,
            policy=self.config.policy.name,
            cache=self.config.run.dir / "rollouts" / f"policy-{os.getpid()}",
        )
        policy = asyncio.create_task(self._policy.run(), name="policy")
        try:
            await producer.start()
            await consumer.start()
            self._consumer = consumer
            async with self._sandboxes() as sandboxes:
                await self._serve(consumer, producer, sandboxes, policy)
        finally:
            policy.cancel()
            await asyncio.gather(policy, return_exceptions=True)
            await consumer.stop()
            await producer.stop()
            await self._engine.stop()

    def _make_engine(self) -> InferenceEngine:
        return make_engine(self.config)

    @contextlib.asynccontextmanager
    async def _sandboxes(self) -> AsyncIterator[SandboxClient | None]:
        """The client, if any domain needs a sandbox."""
        if not any(environment.toolchain for environment in self._environments.values()):
            yield None
            return
        settings = self.config.sandboxes
        targets = self.config.rollouts.sandbox_targets
        async with SandboxClient(targets, lease_s=settings.lease_s) as client:
            yield client

    async def _serve(
        self,
        consumer: Consumer,
        producer: Producer,
        sandboxes: SandboxClient | None,
        policy: asyncio.Task[None],
    ) -> None:
        committed = lagged = time.monotonic()
        while not self.context.stopping.is_set():
            if policy.done():
                policy.result()
            room = self.config.rollouts.max_tasks - len(self._tasks)
            if room > 0:
                for record in await consumer.poll(max_records=room, timeout_s=_POLL_S):
                    if record.deliveries >= self.config.rollouts.max_deliveries:
                        await self._alone(record, consumer, producer, sandboxes)
                    else:
                        self._begin(record, consumer, producer, sandboxes)
            else:
                await asyncio.wait(self._tasks, timeout=_POLL_S, return_when="FIRST_COMPLETED")
            now = time.monotonic()
            if now - committed > _COMMIT_EVERY_S:
                await consumer.commit()
                committed = now
            if now - lagged > _LAG_EVERY_S:
                await self._measure_lag(consumer)
                lagged = now
        await self._drain(consumer)

    async def _measure_lag(self, consumer: Consumer) -> None:
        try:
            self._lag_records = sum(p.lag_records for p in await consumer.positions())
        except InfraError as error:
            # A number to look at; the work itself notices when the broker stays away.
            log.warning("lag unknown", error=str(error))

    async def _alone(
        self,
        record: Record,
        consumer: Consumer,
        producer: Producer,
        sandboxes: SandboxClient | None,
    ) -> None:
        """Work on a task that others were given and did not finish, and on nothing else: if this
        worker dies, the next one knows of what.
        """
        await self._others_done()
        if self.context.stopping.is_set():
            return
        died = await consumer.begin_alone(record)
        if died is None:
            return
        if died >= _DEATHS:
            key = record.key.decode("utf-8", "replace")
            error = ContractError(
                f"task {key} ended {died} workers that had nothing else to do",
                hint="see the end of their logs; `rollstream deadletters redrive` when it is cured",
            )
            await self._bury(record, error, producer)
            consumer.done(record)
            return
        self._begin(record, consumer, producer, sandboxes)
        await self._others_done()

    async def _others_done(self) -> None:
        """Wait for what is at work; who waits for a policy version has begun nothing."""
        while (busy := self._tasks - self._held) and not self.context.stopping.is_set():
            await asyncio.wait(busy, timeout=_POLL_S, return_when=asyncio.FIRST_COMPLETED)

    def _begin(
        self,
        record: Record,
        consumer: Consumer,
        producer: Producer,
        sandboxes: SandboxClient | None,
    ) -> None:
        work = self._work(record, consumer, producer, sandboxes)
        task = asyncio.create_task(work, name=f"task-{record.key.decode('utf-8', 'replace')}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        # Not acknowledged: the record comes again after the restart.
        if self._fatal is None:
            self._fatal = _first(error)
            log.error("ending the worker", error=str(self._fatal) or repr(self._fatal))
        self.context.stopping.set()

    async def _drain(self, consumer: Consumer) -> None:
        """Finish what is in flight; what the drain time does not allow comes again elsewhere."""
        hopeless = self._tasks & self._held if self._fatal is None else self._tasks
        for task in hopeless:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self.config.rollouts.drain_s * _DRAIN_SHARE)
        left = set(self._tasks)
        for task in left:
            task.cancel()
        if left:
            log.warning("tasks left for another worker", tasks=len(left))
            await asyncio.gather(*left, return_exceptions=True)
        await consumer.commit()
        if self._fatal is not None:
            raise self._fatal

    async def _work(
        self,
        record: Record,
        consumer: Consumer,
        producer: Producer,
        sandboxes: SandboxClient | None,
    ) -> None:
        """One task from record to acknowledgement."""
        try:
            task = self._bus.decode(record)
            assert isinstance(task, events_pb2.Task)
            environment = self._environment(task)
        except ContractError as error:
            await self._bury(record, error, producer)
            consumer.done(record)
            return
        await self._hold(task.min_policy_version)
        parent = telemetry.extract(record.headers)
        with tracer.start_as_current_span("process task", context=parent) as span:
            span.set_attributes(
                {"rollstream.task_id": task.task_id, "rollstream.domain": task.domain}
            )
            job = _Job(
                task=task,
                deliveries=record.deliveries,
                environment=environment,
                sandboxes=sandboxes,
                queued_at=time.monotonic(),
            )
            async with asyncio.TaskGroup() as group:
                for index in range(max(1, task.group_size)):
                    work = self._sample(job, index)
                    group.create_task(
                        self._send(producer, work), name=f"rollout-{task.task_id}-{index}"
                    )
        consumer.done(record)

    async def _hold(self, version: int) -> None:
        """Wait for the policy version; a drain does not wait for such a task."""
        assert self._policy is not None
        current = asyncio.current_task()
        self._held.add(current)
        try:
            await self._policy.at_least(version)
        finally:
            self._held.discard(current)

    async def _send(
        self, producer: Producer, work: Coroutine[None, None, events_pb2.Trajectory]
    ) -> None:
        trajectory = await work
        await producer.send_batch(TRAJECTORIES, [(trajectory.group_id, trajectory)])

    def _environment(self, task: events_pb2.Task) -> Environment:
        if task.group_size > _MAX_GROUP_SIZE:
            raise ContractError(
                f"task {task.task_id} asks for {task.group_size} samples; {_MAX_GROUP_SIZE} at most"
            )
        environment = self._environments.get(task.domain)
        if environment is None:
            raise ContractError(
                f"task {task.task_id} is of unknown domain {task.domain!r}",
                hint=f"known: {', '.join(sorted(self._environments)) or 'none'}",
            )
        return environment

    async def _sample(self, job: _Job, index: int) -> events_pb2.Trajectory:
        """One sample: as many attempts as it takes, up to the limit.

        A task that is delivered again has higher attempts than any of its earlier deliveries: what
        it samples then is something else, under the same rollout id.
        """
        assert self._policy is not None
        assert self._policy.chat is not None
        attempts = self.config.rollouts.max_attempts
        last: Exception = InfraError("no attempt was made")
        first = job.deliveries * attempts
        for attempt in range(first, first + attempts):
            spec = RolloutSpec(
                task=job.task,
                sample_index=index,
                attempt=attempt,
                worker_id=self._worker_id,
                queued_at=job.queued_at,
            )
            rollout = Rollout(
                spec,
                engine=self._engine,
                chat=self._policy.chat,
                environment=job.environment,
                sandboxes=job.sandboxes,
                max_length=self.config.policy.max_length,
                max_tool_chars=self.config.rollouts.max_tool_chars,
            )
            async with self._slots.take(job.task.priority):
                outcome = await self._attempt(rollout, spec)
            if isinstance(outcome, events_pb2.Trajectory):
                self._done += 1
                self._sandbox_wait_s += outcome.timings.sandbox_wait_s
                return outcome
            last = outcome
            if not isinstance(outcome, InfraError):
                break
            self._retried += attempt + 1 < first + attempts
        self._failed += 1
        return failed_trajectory(spec, last)

    async def _attempt(
        self, rollout: Rollout, spec: RolloutSpec
    ) -> events_pb2.Trajectory | Exception:
        """The trajectory, or why there is none. A rollout that goes wrong is data: whatever it
        raises is recorded on it alone, but for a broken engine, which would spoil them all.
        """
        try:
            return await rollout.run()
        except EngineBrokenError:
            raise
        except (InfraError, ContractError) as error:
            log.warning(
                "attempt failed", rollout=spec.rollout_id, attempt=spec.attempt, error=str(error)
            )
            return error
        except Exception as error:
            log.exception("rollout crashed", rollout=spec.rollout_id, attempt=spec.attempt)
            return error

    async def _bury(self, record: Record, error: ContractError, producer: Producer) -> None:
        log.error("dead letter", topic=record.topic, offset=record.offset, error=str(error))
        task = events_pb2.Task()
        try:
            task.ParseFromString(record.value)
        except DecodeError:
            task.Clear()
        training = task.purpose == events_pb2.PURPOSE_TRAIN
        letter = dead_letter(
            record,
            error,
            service=self.name,
            run_id=self.config.run.id,
            # The key first: bytes that were changed may name a task that there is not.
            task_id=record.key.decode("utf-8", "replace") or task.task_id,
            samples=task.group_size if training else 0,
        )
        await send_dead_letter(producer, letter)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """A task in the hands of this worker; ``deliveries``: how often it may have been before."""

    task: events_pb2.Task
    deliveries: int
    environment: Environment
    sandboxes: SandboxClient | None
    queued_at: float


def _first(error: BaseException) -> BaseException:
    """The first error inside a group of them: the one that the others followed."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class _Rate:
    """A running total as a rate over the last few seconds."""

    def __init__(self) -> None:
        self._at, self._total, self._rate = time.monotonic(), 0.0, 0.0

    def per_second(self, total: float) -> float:
        now = time.monotonic()
        if now - self._at >= 2.0:
            self._rate = (total - self._total) / (now - self._at)
            self._at, self._total = now, total
        return self._rate


def main() -> int:
    """Entry point; the engine reads its environment when it is imported, later than this."""
    if sys.platform != "linux":
        raise ConfigError("rollout workers run on Linux")
    return lifecycle.main(Rollouts)


if __name__ == "__main__":
    sys.exit(main())
