"""The service that turns trajectories into rewards and training groups.

| task | waits for | unblocked by |
|---|---|---|
| Faust agents | records of ``trajectories`` and ticks; room for them | Kafka; ``batches`` |
| ``batches`` | records; deliveries | the agents; Kafka |
| ``ticks`` | a second | time; ticks groups whose deadline has passed |

Failure: when a delivery fails for good or an agent fails, the process ends with status 1 and begins
again at the last commit; nothing is acknowledged before it is delivered.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping

import structlog

from processors.app import TICKS, ProcessorApp, table_names
from processors.letters import APP
from rollstream import lifecycle
from rollstream.bus import admin
from rollstream.bus.kafka import KafkaBus, within_budget
from rollstream.errors import InfraError
from rollstream.lifecycle import Service, ServiceContext
from rollstream.liveness import Progress
from rollstream.topics import REPLAY, REWARDS, TRAJECTORIES

log = structlog.get_logger(__name__)

_TICK_EVERY_S = 1.0
_START_S = 120.0


class Processors(Service):
    """Scores, normalises and groups trajectories."""

    name = "processors"

    def __init__(self, context: ServiceContext) -> None:
        super().__init__(context)
        self._bus = KafkaBus(self.config)
        self._processor: ProcessorApp | None = None
        self._ready = False

    def ready(self) -> bool:
        return self._ready

    def stats(self) -> Mapping[str, float]:
        processor = self._processor
        if processor is None:
            return {}
        return {
            "events_total": processor.events_total,
            "groups_open": len(processor.pipeline.open),
            "dead_letters_total": processor.dead_letters_total,
        }

    async def progress(self) -> Progress | None:
        """Records past the last commit, in the partitions of this worker."""
        processor = self._processor
        if processor is None or not self._ready:
            return None
        ends = await self._bus.end_offsets(TRAJECTORIES)
        done = await self._bus.committed(APP, TRAJECTORIES)
        waiting = sum(max(0, ends[p] - done.get(p, 0)) for p in processor.partitions())
        return Progress(waiting=waiting, done=processor.events_total)

    async def run(self) -> None:
        await self._make_topics()
        producer = self._bus.producer(client_id="processors")
        await producer.start()
        processor = self._processor = ProcessorApp(self.config, self._bus, producer)
        try:
            async with asyncio.timeout(_START_S):
                await processor.app.start()
            self._ready = True
            await self._serve(processor)
        except TimeoutError as error:
            raise InfraError(f"Faust did not start within {_START_S:.0f} s") from error
        finally:
            self._ready = False
            await processor.app.stop()
            await producer.stop()

    async def _make_topics(self) -> None:
        await self._bus.ensure_topics([TRAJECTORIES, REWARDS, REPLAY])
        partitions = await self._bus.partitions(TRAJECTORIES)
        for name in (*table_names(self.config), self.config.bus.topic_prefix + TICKS):
            await within_budget(
                self.config.bus,
                "tables",
                lambda n=name: admin.create_compacted(self._bus, n, partitions=partitions),  # type: ignore[misc]
            )

    async def _serve(self, processor: ProcessorApp) -> None:
        """Until the wish to stop; an error of any part ends the service."""
        working = asyncio.create_task(processor.run(), name="batches")
        ticks = asyncio.create_task(self._tick(processor), name="ticks")
        stopping = asyncio.create_task(self.context.stopping.wait(), name="stopping")
        tasks = [working, ticks, stopping]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for ended in done:
                ended.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _tick(self, processor: ProcessorApp) -> None:
        while True:
            await asyncio.sleep(_TICK_EVERY_S)
            if processor.app.crashed:
                raise InfraError(f"Faust crashed: {processor.app.crash_reason!r}")
            await processor.send_ticks()


if __name__ == "__main__":
    sys.exit(lifecycle.main(Processors))
