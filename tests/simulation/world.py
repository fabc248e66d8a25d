"""One simulated run: broker, store, disk, the services under a supervisor, and the faults of one seed.

The order of things: services start; faults are drawn until their time is over; then everything is mended and must
come to rest, with every sample accounted for (``checks.py``). Whatever a seed decides comes from one random number
generator, so that the seed alone gives the run again, step by step.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import logging
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import structlog

from environments import registry
from producers.main import Producers
from rollstream.bus import Record
from rollstream.config import Config, load
from rollstream.errors import RollstreamError
from rollstream.lifecycle import Service, ServiceContext
from rollstream.testing import MemoryBroker, MemoryBus, Network
from rollstream.testing.memory_broker import Offsets
from rollstream.topics import ALL
from tests.simulation import checks, derived, faults
from tests.simulation.faults import Profile
from tests.simulation.kernel import Loop, Process, Stuck, current, virtual_time
from tests.simulation.services import (
    INTERNAL,
    Outside,
    SimulatedProcessors,
    SimulatedRollouts,
    SimulatedSink,
    SimulatedTrainer,
)
from tests.simulation.store import Store

T = TypeVar("T")
RUN = "simulated"
_MAX_STEPS = 2_000_000
# After the faults: five group deadlines and session timeouts, and the store's retries.
_REST_S = 400.0
_LOOK_EVERY_S = 1.0
_BACKOFF_S = (0.2, 1.0)
_SETTINGS = (
    f'run.id="{RUN}"',
    'domains=[{name="a", environment="simulated", group_size=3, weight=2.0},'
    ' {name="b", environment="simulated", group_size=2, tier="long"}]',
    "bus.mode=external",
    'bus.bootstrap_servers="simulated"',
    "bus.session_timeout_s=6.0",
    "bus.request_timeout_s=2.0",
    "bus.retry_budget_s=20.0",
    "processors.group_deadline_s=15.0",
    "processors.commit_interval_s=0.05",
    "rollouts.max_tasks=4",
    "rollouts.max_rollouts=5",
    "rollouts.drain_s=3.0",
    "policy.max_length=64",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a seed came to. ``digest`` is that of every record, in the order in which they came."""

    seed: int
    violations: tuple[str, ...]
    digest: str
    steps: int
    virtual_s: float
    told: tuple[str, ...]
    counts: dict[str, int]


class SimulatedNetwork(Network):
    """Takes its time, and loses requests and answers; ``down``: all of them."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.losing = 0.0
        self.down = False
        self.slow_s = 0.01
        self.overtaken = 0
        self._last_arrival = 0.0

    def request_s(self, client: str) -> float | None:
        if (takes := self._way()) is not None:
            arrival = asyncio.get_running_loop().time() + takes
            self.overtaken += arrival < self._last_arrival
            self._last_arrival = max(self._last_arrival, arrival)
        return takes

    def response_s(self, client: str) -> float | None:
        return self._way()

    def batch(self, waiting: int) -> int:
        return self._rng.randint(1, waiting)

    def _way(self) -> float | None:
        if self.down or (self.losing and self._rng.random() < self.losing):
            return None
        return self._rng.uniform(0.0005, self.slow_s)


class Broker(MemoryBroker):
    """A broker that knows whose process asks, which may die of what it asked for, before it is done or after; and whose
    disk may change a bit. ``damaging``: the topic whose next record it hits.
    """

    def __init__(self, loop: Loop, rng: random.Random) -> None:
        super().__init__(cluster_id="simulated")
        self.damaging = ""
        # What they were, by topic and key.
        self.damaged: dict[tuple[str, bytes], bytes] = {}
        self.repeated = 0
        self._loop = loop
        self._rng = rng
        self._owners: dict[str, Process] = {}

    def new_client(self, client_id: str) -> str:
        client = super().new_client(client_id)
        if (process := current()) is not None:
            self._owners[client] = process
        return client

    def produce(
        self, producer: str, name: str, partition: int, first: int, records: Sequence[Record]
    ) -> None:
        self.repeated += self._sequences.get((producer, name, partition), 0) > first
        self._cut(producer, partial(super().produce, producer, name, partition, first, records))

    def commit(self, group_id: str, member: str, generation: int, offsets: Offsets) -> bool:
        done = self._cut(member, partial(super().commit, group_id, member, generation, offsets))
        return bool(done)

    def _cut(self, client: str, work: Callable[[], T]) -> T | None:
        """Do ``work``; or lose it together with the process that asked for it."""
        process = self._owners.get(client)
        if process is None or not self._loop.cuts(process):
            return work()
        done = work() if self._rng.random() < 0.5 else None
        self._loop.kill(process)
        return done

    def append(self, name: str, partition: int, record: Record) -> Record:
        at = (name, record.key)
        if name == self.damaging and record.value and at not in self.damaged:
            self.damaging = ""
            self.damaged[at] = record.value
            bits = bytearray(record.value)
            # In the id that names it, at times.
            named = record.value.find(record.key) if self._rng.random() < 0.3 else -1
            first, count = (named, len(record.key)) if named >= 0 else (0, len(bits))
            bits[first + self._rng.randrange(count)] ^= 1 << self._rng.randrange(8)
            record = replace(record, value=bytes(bits))
        return super().append(name, partition, record)


@dataclass(slots=True)
class Slot:
    """A place where a service runs, one life after another."""

    name: str
    make: Callable[[ServiceContext], Service]
    config: Config
    process: Process | None = None
    context: ServiceContext | None = None
    service: Service | None = None
    lives: int = 0
    # Not to be started again.
    retired: bool = False
    task: asyncio.Task[None] | None = None


@dataclass(slots=True)
class World:
    """Everything of one run."""

    seed: int
    folder: Path
    loop: Loop
    rng: random.Random
    profile: Profile
    config: Config
    broker: Broker
    network: SimulatedNetwork
    outside: Outside
    slots: dict[str, Slot] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    record_digest: "hashlib._Hash" = field(default_factory=hashlib.sha256)  # noqa: UP037
    mended: bool = False
    _offers: Any = None
    # What ``checks.events`` has decoded, by topic.
    decoded: dict[str, Any] = field(default_factory=dict)

    def tell(self, what: str) -> None:
        """A line of the story, for whoever reads a failure."""
        self.told.append(f"{self.loop.now:9.3f} {what}")

    def violated(self, what: str) -> None:
        self.violations.append(what)
        self.tell(f"VIOLATION {what}")

    def count(self, what: str, times: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + times

    # -- slots

    def add(self, kind: str) -> Slot:
        """One more place for a service of this kind."""
        number = sum(slot.name.split("-")[0] == kind for slot in self.slots.values())
        name = f"{kind}-{number}"
        # Workers keep their weights in their own folders, as they have pids of their own.
        folder = self.folder if kind == "trainer" else self.folder / name
        run = self.config.run.model_copy(update={"dir": folder})
        blob = self.config.blob.model_copy(update={"uri": str(self.folder / "blobs")})
        config = self.config.model_copy(update={"run": run, "blob": blob})
        slot = self.slots[name] = Slot(name=name, make=self._maker(kind), config=config)
        slot.task = self.loop.create_task(self._supervise(slot), name=f"supervise-{name}")
        return slot

    def _maker(self, kind: str) -> Callable[[ServiceContext], Service]:
        if kind == "producers":
            return Producers
        base = _SIMULATED[kind]
        return type(base.__name__, (base,), {"outside": self.outside})

    def bus(self, config: Config) -> MemoryBus:
        return MemoryBus(config, self.broker, network=self.network)

    async def _supervise(self, slot: Slot) -> None:
        """Start, and start again when it ends, however that was."""
        while not slot.retired:
            slot.lives += 1
            process = slot.process = self.loop.process(f"{slot.name}.{slot.lives}")
            context = slot.context = ServiceContext(config=slot.config, connect=self.bus)
            service = slot.service = process.context.run(slot.make, context)
            life = self.loop.create_task(service.run(), context=process.context)
            await asyncio.wait({life, process.died}, return_when=asyncio.FIRST_COMPLETED)
            if life.done():
                self._ended(slot, life, context)
                self.loop.kill(process)
            else:
                process.remains.append(life)
                self.count("kills")
                self.tell(f"{process.name} killed after {process.steps} steps")
            slot.process = slot.context = None
            await asyncio.sleep(self.rng.uniform(*_BACKOFF_S))

    def _ended(self, slot: Slot, life: asyncio.Task[None], context: ServiceContext) -> None:
        error = None if life.cancelled() else life.exception()
        self.tell(f"{slot.name}.{slot.lives} ended: {error!r}"[:300])
        if error is None:
            if not context.stopping.is_set():
                self.violated(f"{slot.name} ended by itself")
        elif not _expected(error):
            self.violated(f"{slot.name} crashed: {error!r}")

    # -- the run

    async def run(self) -> None:
        self._offers = derived.Offers(self)
        self.broker.on_append = self._appended
        self.broker.on_commit = partial(checks.on_commit, self)
        for topic in (*ALL, *INTERNAL):
            count = topic.partitions or self.config.bus.partitions
            self.broker.ensure(topic.name, topic, count)
        for kind in ("sink", "trainer", "processors", "producers", "rollouts"):
            self.add(kind)
        for kind, more in (("rollouts", self.profile.workers - 1), ("processors", 0)):
            for _ in range(more):
                self.add(kind)
        await faults.strike(self)
        self.mended = True
        self.tell("mended")
        await self._rest()

    async def _rest(self) -> None:
        """Everything must come to rest with nothing in flight."""
        deadline = self.loop.now + _REST_S
        while self.loop.now < deadline and not self.violations:
            if (left := checks.unfinished(self)) is None:
                return
            await asyncio.sleep(_LOOK_EVERY_S)
        if not self.violations:
            for slot in self.slots.values():
                if slot.process is not None and slot.service is not None:
                    self.tell(f"{slot.process.name} stands at {dict(slot.service.stats())}")
            self.violated(f"no rest {_REST_S:.0f} s after the last fault: {left}")

    def _appended(self, name: str, record: Record) -> None:
        self._offers.on_append(name, record)
        self.record_digest.update(f"{name}/{record.partition}".encode())
        # The run's folder has another name each time.
        self.record_digest.update(record.key + record.value.replace(bytes(self.folder), b"."))


def _expected(error: BaseException) -> bool:
    """Errors that a service may end with: those of the tree, alone or in groups."""
    if isinstance(error, BaseExceptionGroup):
        return all(_expected(inner) for inner in error.exceptions)
    return isinstance(error, RollstreamError)


_SIMULATED: dict[str, type[Service]] = {
    "rollouts": SimulatedRollouts,
    "trainer": SimulatedTrainer,
    "sink": SimulatedSink,
    "processors": SimulatedProcessors,
}


def simulate(seed: int, *, profile: Profile | None = None) -> Report:
    """Run one seed to its end. Call ``kernel.collect`` after the last."""
    rng = random.Random(seed)
    with _folder() as folder, _quiet():
        report, loop = _run(seed, rng, folder, profile or Profile.draw(rng))
        loop.discard()
    return report


def _run(seed: int, rng: random.Random, folder: Path, profile: Profile) -> tuple[Report, Loop]:
    world = _world(seed, rng, folder, profile)
    loop = world.loop
    with virtual_time(loop), mock.patch("trainer.checkpoint._sync", _synced(world)):
        try:
            loop.run_until_complete(world.run())
        except Stuck as stuck:
            world.violated(str(stuck))
        world.violations += world.outside.seen
        world.violations += [f"unhandled: {crash}" for crash in loop.crashes]
        if not world.violations:
            world.violations += checks.at_rest(world)
        if not world.violations:
            world.violations += derived.problems(world)
    world.count("requests overtaken", world.network.overtaken)
    world.count("batches repeated", world.broker.repeated)
    world.count("rebalances", sum(group.generation for group in world.broker.groups.values()))
    for slot in world.slots.values():
        world.count(f"restarts of {slot.name.split('-')[0]}", slot.lives - 1)
        world.count("second workers", slot.name.endswith("-1"))
    report = Report(
        seed=seed,
        violations=tuple(world.violations),
        digest=world.record_digest.hexdigest(),
        steps=loop.steps,
        virtual_s=loop.now,
        told=tuple(world.told),
        counts=world.counts,
    )
    return report, loop


def _world(seed: int, rng: random.Random, folder: Path, profile: Profile) -> World:
    # Every second seed: what comes again is done alone, and in the end is a dead letter.
    often = 2 if seed % 2 else 1_000_000
    own = (
        f'run.dir="{folder}"',
        f"run.seed={seed}",
        f"rollouts.max_deliveries={often}",
        *profile.settings,
    )
    config = load(overrides=(*_SETTINGS, *own), environ={})
    loop = Loop(rng, max_steps=_MAX_STEPS)
    broker, network = Broker(loop, rng), SimulatedNetwork(rng)
    world = World(
        seed=seed,
        folder=folder,
        loop=loop,
        rng=rng,
        profile=profile,
        config=config,
        broker=broker,
        network=network,
        outside=Outside(loop=loop, store=Store(loop), bus=lambda _: NotImplemented),
    )
    world.outside.bus = world.bus
    return world


def _synced(world: World) -> Callable[[Path], None]:
    """In place of fsync: the disk is memory, but it may be full, and a process may die at each."""

    def sync(path: Path) -> None:
        world.loop.effect()
        if world.outside.disk_full:
            raise OSError(errno.ENOSPC, "the disk is full", str(path))

    return sync


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    shared = Path("/dev/shm")
    folder = tempfile.mkdtemp(prefix="rollstream-sim-", dir=shared if shared.is_dir() else None)
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Services log much, and faults more; the story is told by ``World.tell``."""
    point = EntryPoint(
        name="simulated", value="tests.simulation.services:Simulated", group=registry.GROUP
    )
    kept = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    logging.disable(logging.CRITICAL)
    try:
        with mock.patch.object(registry, "_find", lambda where, name: point):
            yield
    finally:
        logging.disable(logging.NOTSET)
        structlog.configure(**kept)
