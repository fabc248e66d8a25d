"""One run of the whole pipeline under faults, and its books at the end.

Everything is real: every service its own process, Kafka, the store, sandboxes, the light engine, a
trainer with checkpoints. Strikes begin with the first optimiser step and end with the last.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from rollstream.bus.kafka import KafkaBus
from rollstream.config import Config, load
from rollstream.demo.feed import MetricsFile, follow_topics, poll_services
from rollstream.demo.orchestrate import settle
from rollstream.demo.state import RunState
from rollstream.errors import InfraError
from rollstream.supervisor.ports import resolve
from rollstream.supervisor.supervisor import Supervisor
from rollstream.topics import TRAINING_STEPS, TRAJECTORIES
from rollstream.v1 import events_pb2
from tests.faults.strikes import Kind, strike
from tests.waiting import until

_RUN_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a campaign came to. Counts of samples but ``strikes`` and ``redone_steps``.

    ``lost``: in flight when everything had come to rest, or missing from their group; ``doubled``:
    trained by two optimiser steps; ``redone``: rollouts that were done again.
    """

    strikes: int
    produced: int
    trained: int
    dropped: dict[str, int]
    dead_lettered: int
    lost: int
    doubled: int
    redone: int
    redone_steps: int
    max_staleness: int
    recovery_s: tuple[float, ...]
    problems: tuple[str, ...]

    @property
    def sound(self) -> bool:
        return not (self.lost or self.doubled or self.problems)


def config_of(folder: Path, *, seed: int, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a run in ``folder``, ports resolved."""
    demo = Path(str(files("rollstream.demo") / "demo.toml"))
    fixed = (f'run.id="faults-{seed}"', f'run.dir="{folder}"', f"run.seed={seed}")
    own = Path(__file__).with_name("run.toml")
    return resolve(load([demo, own], overrides=(*fixed, *overrides), environ={}))


async def campaign(
    config: Config, *, targets: Sequence[str], strikes: int, kind: Kind = Kind.KILL
) -> Outcome:
    """Strike ``targets`` in turn, up to ``strikes`` times; then let the run end and do its books."""
    chance = random.Random(config.run.seed)
    state = RunState(run_id=config.run.id, seed=config.run.seed)
    supervisor = Supervisor(config, config.supervisor.services)
    recoveries: list[float] = []
    try:
        await supervisor.start()
        async with _followed(supervisor, state):
            await supervisor.ready()
            await until(lambda: _reached(supervisor, bool(state.steps)), seconds=_RUN_S)
            while len(recoveries) < strikes and state.final_version is None:
                # Not always at the same point of what it does.
                await asyncio.sleep(chance.uniform(0.1, 1.5))
                target = targets[len(recoveries) % len(targets)]
                recoveries.append(await strike(supervisor, target, kind))
            await until(lambda: _reached(supervisor, state.final is not None), seconds=_RUN_S)
            redone, redone_steps = await _repeats(config)
            books = await settle(supervisor, config, state)
    finally:
        await supervisor.close()
    return _outcome(books, recoveries, redone, redone_steps, state)


@asynccontextmanager
async def _followed(supervisor: Supervisor, state: RunState) -> AsyncIterator[None]:
    metrics = MetricsFile(supervisor.config.run.dir / "metrics.jsonl")
    tasks = [
        asyncio.create_task(_persistent(supervisor.config, state, metrics), name="topics"),
        asyncio.create_task(poll_services(supervisor, state, metrics), name="services"),
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        metrics.close()


async def _persistent(config: Config, state: RunState, metrics: MetricsFile) -> None:
    """Follow the topics, also when the broker is struck."""
    while True:
        try:
            await follow_topics(config, state, metrics)
        except InfraError:
            await asyncio.sleep(0.2)


def _reached(supervisor: Supervisor, condition: bool) -> bool:
    supervisor.check()
    return condition


async def _repeats(config: Config) -> tuple[int, int]:
    """Rollouts and optimiser steps that are on their topics more than once."""
    bus = KafkaBus(config)
    consumer = bus.consumer([TRAJECTORIES, TRAINING_STEPS], client_id="faults")
    await consumer.start()
    seen: dict[type, Counter[str]] = {}
    try:
        while records := await consumer.poll(timeout_s=2.0):
            for event in map(bus.decode, records):
                assert isinstance(event, events_pb2.Trajectory | events_pb2.TrainingStep)
                rollout = isinstance(event, events_pb2.Trajectory)
                name = event.rollout_id if rollout else event.header.event_id
                seen.setdefault(type(event), Counter())[name] += 1
    finally:
        await consumer.stop()

    def again(kind: type) -> int:
        return sum(count - 1 for count in seen.get(kind, Counter()).values())

    return again(events_pb2.Trajectory), again(events_pb2.TrainingStep)


def _outcome(
    books: dict[str, Any],
    recoveries: Sequence[float],
    redone: int,
    redone_steps: int,
    state: RunState,
) -> Outcome:
    dropped = dict(books["dropped"])
    known = books["trained"] + sum(dropped.values()) + books["dead_lettered"]
    return Outcome(
        strikes=len(recoveries),
        produced=books["produced"],
        trained=books["trained"],
        dropped=dropped,
        dead_lettered=books["dead_lettered"],
        lost=books["produced"] - known + dropped.get("missing", 0),
        doubled=_doubled(books["problems"]),
        redone=redone,
        redone_steps=redone_steps,
        max_staleness=max((point.staleness for point in state.steps), default=0),
        recovery_s=tuple(recoveries),
        problems=tuple(books["problems"]),
    )


def _doubled(problems: Sequence[str]) -> int:
    """The samples that the audit found trained twice; it says so in words."""
    found = [re.match(r"(\d+) samples trained in two steps", problem) for problem in problems]
    return sum(int(match[1]) for match in found if match)
