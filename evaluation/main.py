"""The service that evaluates policy versions on held-out tasks, through the same pipeline.

The baseline and the final version are always evaluated, others every ``every_versions``. Tasks are
greedy and go before training tasks; their rewards come back on ``rewards``.

Failure: nothing is kept. On start it reads what was evaluated (``evaluations``) and what was scored
(``rewards``) from the beginning; tasks have ids that depend on suite, version and index alone, so
that a suite that was interrupted is simply done again.

| task | waits for | unblocked by |
|---|---|---|
| main loop | versions, rewards | trainer, processors; time for the deadline |
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from itertools import islice

import structlog

from environments.base import TaskSpec
from environments.registry import make
from environments.tasks import TaskOrigin, evaluation_task, topic_of
from evaluation.suite import SuiteRun
from rollstream import lifecycle
from rollstream.bus import Consumer, Producer, Record
from rollstream.errors import ContractError
from rollstream.lifecycle import Service, ServiceContext
from rollstream.topics import EVALUATIONS, POLICY_VERSIONS, REWARDS
from rollstream.v1 import events_pb2, policy_pb2

log = structlog.get_logger(__name__)

_POLL_S = 0.2


class Evaluation(Service):
    """Evaluates versions as they are published."""

    name = "evaluation"

    def __init__(self, context: ServiceContext) -> None:
        super().__init__(context)
        self._bus = context.connect(self.config)
        domains = [self.config.domain(name) for name in self.config.evaluation.domains]
        self._domains = [(domain, make(domain)) for domain in domains]
        self._queue: list[policy_pb2.PolicyVersion] = []
        self._seen: set[int] = set()
        self._finished: set[int] = set()
        self._suite: SuiteRun | None = None
        self._deadline = 0.0
        self._last_score = 0.0
        self._ready = False

    def ready(self) -> bool:
        return self._ready

    def stats(self) -> Mapping[str, float]:
        return {
            "evaluations_done": len(self._finished),
            "outstanding": len(self._suite.outstanding) if self._suite else 0,
            "queued": len(self._queue),
            "last_score": self._last_score,
        }

    async def run(self) -> None:
        producer = self._bus.producer(client_id="evaluation")
        consumer = self._bus.consumer(
            [POLICY_VERSIONS, REWARDS, EVALUATIONS], client_id="evaluation"
        )
        await producer.start()
        await consumer.start()
        # Rewards that are there already: a suite that is done again finds its results among them.
        self._scored: dict[str, events_pb2.ScoredTrajectory] = {}
        try:
            await self._catch_up(consumer, producer)
            self._ready = True
            while not self.context.stopping.is_set():
                await self._advance(producer)
                await self._absorb(await consumer.poll(timeout_s=_POLL_S), producer)
        finally:
            await consumer.stop()
            await producer.stop()

    async def _catch_up(self, consumer: Consumer, producer: Producer) -> None:
        behind = True
        while behind and not self.context.stopping.is_set():
            await self._absorb(await consumer.poll(max_records=2000, timeout_s=_POLL_S), producer)
            behind = any(p.position < p.end for p in await consumer.positions())

    async def _advance(self, producer: Producer) -> None:
        """Begin the next suite when there is none, and end one whose time is up."""
        if self._suite is not None and time.monotonic() > self._deadline:
            log.error("suite timed out", missing=len(self._suite.outstanding))
            missing = self._suite.give_up()
            await producer.send_batch(EVALUATIONS, [(self._suite.suite, r) for r in missing])
            await self._finish(producer)
        while self._suite is None and self._queue:
            version = self._queue.pop(0)
            if version.version not in self._finished:
                await self._begin(version, producer)

    async def _begin(self, version: policy_pb2.PolicyVersion, producer: Producer) -> None:
        settings = self.config.evaluation
        suite = SuiteRun(
            run_id=self.config.run.id,
            suite=settings.suite,
            version=version.version,
            baseline=version.baseline,
            final=version.final,
        )
        self._suite, self._deadline = suite, time.monotonic() + settings.timeout_s
        deliveries = []
        share = max(1, settings.tasks // max(1, len(self._domains)))
        for domain, environment in self._domains:
            tasks = environment.tasks(seed=self.config.run.seed, split="held-out")
            for index, spec in enumerate(islice(tasks, share)):
                if not isinstance(spec, TaskSpec):
                    log.warning("held-out task rejected", error=str(spec.error))
                    continue
                source = f"{settings.suite}/v{version.version}/{domain.name}/{environment.source}"
                origin = TaskOrigin(
                    run_id=self.config.run.id, source=source, index=index, seed=self.config.run.seed
                )
                task = evaluation_task(
                    environment,
                    domain,
                    spec,
                    origin,
                    suite=settings.suite,
                    min_policy_version=version.version,
                )
                suite.outstanding[task.task_id] = domain.name
                deliveries.append(await producer.send(topic_of(domain), task, key=task.task_id))
        for delivery in deliveries:
            await delivery
        log.info("suite begun", version=version.version, tasks=len(deliveries))
        for scored in list(self._scored.values()):
            await self._take(scored, producer)
        if suite.done and self._suite is suite:
            await self._finish(producer)

    async def _take(self, scored: events_pb2.ScoredTrajectory, producer: Producer) -> None:
        suite = self._suite
        if suite is None:
            return
        result = suite.take(scored)
        if result is None:
            return
        await producer.send_batch(EVALUATIONS, [(suite.suite, result)])
        if suite.done:
            await self._finish(producer)

    async def _finish(self, producer: Producer) -> None:
        suite = self._suite
        assert suite is not None
        total = suite.total()
        await producer.send_batch(EVALUATIONS, [(suite.suite, total)])
        self._finished.add(suite.version)
        self._last_score = total.score
        self._suite = None
        self._scored.clear()
        log.info("suite done", version=suite.version, score=round(total.score, 4))

    async def _absorb(self, records: list[Record], producer: Producer) -> None:
        for record in records:
            try:
                event = self._bus.decode(record)
            except ContractError as error:
                log.error("event ignored", topic=record.topic, error=str(error))
                continue
            if isinstance(event, policy_pb2.PolicyVersion):
                self._on_version(event)
            elif isinstance(event, events_pb2.EvaluationResult):
                self._on_result(event)
            elif isinstance(event, events_pb2.ScoredTrajectory):
                await self._on_scored(event, producer)

    def _on_version(self, event: policy_pb2.PolicyVersion) -> None:
        every = self.config.evaluation.every_versions
        wanted = event.baseline or event.final or (every and event.version % every == 0)
        if event.header.run_id != self.config.run.id or event.version in self._seen:
            return
        self._seen.add(event.version)
        if wanted and self._domains:
            self._queue.append(event)

    def _on_result(self, event: events_pb2.EvaluationResult) -> None:
        if not event.task_id and event.suite == self.config.evaluation.suite:
            self._finished.add(event.policy_version)
            self._last_score = event.score

    async def _on_scored(self, event: events_pb2.ScoredTrajectory, producer: Producer) -> None:
        if event.purpose != events_pb2.PURPOSE_EVAL or event.suite != self.config.evaluation.suite:
            return
        if self._suite is None:
            event.ClearField("sequences")
            self._scored[event.task_id] = event
        else:
            await self._take(event, producer)


if __name__ == "__main__":
    sys.exit(lifecycle.main(Evaluation))
