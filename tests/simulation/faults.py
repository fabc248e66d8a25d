"""What goes wrong in a run, drawn from its seed: which kinds, how often, and when.

Each seed draws a profile, so that some runs have one kind of fault only and others all of them at once.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rollstream.bus import Record
from rollstream.topics import REPLAY, TASKS_SHORT, TRAJECTORIES
from tests.simulation.kernel import WORK_S

if TYPE_CHECKING:
    from tests.simulation.world import Slot, World

Fault = Callable[["World"], Awaitable[None]]
# Longest pause: longer than a session lasts, so that a process wakes after it was replaced.
_PAUSE_S = 9.0
_OUTAGE_S = 15.0
_JUMP_S = 40.0
# Cuts find most: what is lost or done twice is so between two things that are made durable.
_CHANCE = {"cut": 0.8}
_WEIGHT = {"cut": 3.0}
_TARGETS = ("producers", "rollouts", "processors", "trainer", "sink")


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """``kinds``: weights of the faults; ``every_s``: mean time between two; ``for_s``: how long."""

    kinds: dict[str, float]
    every_s: float
    for_s: float
    workers: int
    slow: bool
    # Only these services are killed, paused and stopped; all if empty.
    targets: tuple[str, ...] = ()
    # What differs of the configuration, as overrides.
    settings: tuple[str, ...] = ()

    @classmethod
    def draw(cls, rng: random.Random) -> Profile:
        chosen = [kind for kind in FAULTS if rng.random() < _CHANCE.get(kind, 0.5)] or ["kill"]
        return cls(
            kinds={kind: rng.uniform(0.2, 1.0) * _WEIGHT.get(kind, 1.0) for kind in chosen},
            every_s=rng.choice([0.5, 1.5, 4.0]),
            for_s=rng.uniform(5.0, 30.0),
            workers=rng.randint(1, 3),
            slow=rng.random() < 0.3,
            targets=(rng.choice(_TARGETS),) if rng.random() < 0.6 else (),
            settings=_draw_settings(rng),
        )


def _draw_settings(rng: random.Random) -> tuple[str, ...]:
    """How far behind the trainer may be, what it does at once, and how the logs are cut."""
    staleness = rng.choice([0, 1, 1, 2])
    return (
        f'trainer.stages=[{{kind="rl", steps={rng.randint(4, 6)},'
        f" groups_per_step={rng.choice([2, 2, 3])}, max_staleness={staleness}}}]",
        # Rarer, and every group would be too old before a version comes.
        f"trainer.publish_every={rng.randint(1, staleness + 1)}",
        f"bus.partitions={rng.choice([1, 2, 2, 3])}",
        f"store.chunk_records={rng.choice([1, 4, 7])}",
    )


async def strike(world: World) -> None:
    """Faults until their time is over; what lasts is over with them."""
    profile, rng = world.profile, world.rng
    if profile.slow:
        world.outside.generate_s = (0.5, 6.0)
        world.network.slow_s = 0.2
    ongoing: set[asyncio.Task[None]] = set()
    end = world.loop.now + profile.for_s
    while profile.kinds and world.loop.now < end:
        await asyncio.sleep(rng.expovariate(1 / profile.every_s))
        kind = rng.choices(list(profile.kinds), list(profile.kinds.values()))[0]
        world.count(kind)
        task = asyncio.get_running_loop().create_task(FAULTS[kind](world), name=kind)
        ongoing.add(task)
        task.add_done_callback(ongoing.discard)
    if ongoing:
        await asyncio.wait(ongoing)


def _running(world: World) -> Slot | None:
    of = world.profile.targets
    slots = [
        slot
        for slot in world.slots.values()
        if slot.process is not None and (not of or slot.name.split("-")[0] in of)
    ]
    return world.rng.choice(slots) if slots else None


async def _kill(world: World) -> None:
    """SIGKILL, somewhere in its next steps; often at once, often much later."""
    slot = _running(world)
    if slot is not None and slot.process is not None:
        slot.process.fuse = int(world.rng.expovariate(1 / world.rng.choice([1, 20, 200])))


async def _cut(world: World) -> None:
    """SIGKILL at one of the next things that it makes durable, before it is or after."""
    slot = _running(world)
    if slot is not None and slot.process is not None:
        slot.process.cut = int(world.rng.expovariate(1 / world.rng.choice([1, 4, 15])))


async def _pause(world: World) -> None:
    """SIGSTOP, and SIGCONT some time later."""
    slot = _running(world)
    if slot is None or (process := slot.process) is None or process.paused:
        return
    seconds = world.rng.uniform(0.1, _PAUSE_S)
    world.tell(f"{process.name} paused for {seconds:.1f} s")
    world.loop.pause(process)
    await asyncio.sleep(seconds)
    world.loop.resume(process)


async def _stop(world: World) -> None:
    """SIGTERM: it drains, and begins again."""
    slot = _running(world)
    if slot is not None and slot.context is not None:
        world.tell(f"{slot.name} told to stop")
        slot.context.stopping.set()


async def _join(world: World) -> None:
    """One more worker, which is killed or told to stop after a while."""
    kind = world.rng.choice(["rollouts", "processors"])
    if sum(slot.name.startswith(kind) and not slot.retired for slot in world.slots.values()) > 3:
        return
    slot = world.add(kind)
    world.tell(f"{slot.name} joins")
    await asyncio.sleep(world.rng.uniform(1.0, 15.0))
    slot.retired = True
    if world.rng.random() < 0.5 and slot.process is not None:
        world.loop.kill(slot.process)
    elif slot.context is not None:
        slot.context.stopping.set()
    world.tell(f"{slot.name} leaves")


async def _store(world: World) -> None:
    """The store fails, in part or wholly."""
    world.outside.store.failing = world.rng.choice([0.2, 0.7, 1.0])
    world.tell(f"store fails: {world.outside.store.failing}")
    await asyncio.sleep(world.rng.uniform(0.5, _OUTAGE_S))
    world.outside.store.failing = 0.0


async def _slow(world: World) -> None:
    """Store and compute take their time."""
    world.loop.work_s = world.rng.choice([0.5, 3.0])
    world.tell(f"work takes up to {world.loop.work_s} s")
    await asyncio.sleep(world.rng.uniform(0.5, _OUTAGE_S))
    world.loop.work_s = WORK_S


async def _full(world: World) -> None:
    """The trainer's disk is full."""
    world.tell("disk full")
    world.outside.disk_full = True
    await asyncio.sleep(world.rng.uniform(0.1, 5.0))
    world.outside.disk_full = False


async def _hang(world: World) -> None:
    """Some calls to the engines hang, longer than a group waits."""
    world.outside.engine_hanging = world.rng.choice([0.1, 0.4])
    world.tell(f"engines hang: {world.outside.engine_hanging}")
    await asyncio.sleep(world.rng.uniform(0.5, _OUTAGE_S))
    world.outside.engine_hanging = 0.0


async def _broker(world: World) -> None:
    """The broker does not answer; longer than anyone waits, at times."""
    seconds = world.rng.choice([1.0, 5.0, 25.0])
    world.tell(f"broker away for {seconds} s")
    world.network.down = True
    await asyncio.sleep(seconds)
    world.network.down = False


async def _loss(world: World) -> None:
    """Requests and answers are lost, each with some probability."""
    world.network.losing = world.rng.choice([0.02, 0.1, 0.3])
    world.tell(f"network loses {world.network.losing}")
    await asyncio.sleep(world.rng.uniform(0.5, _OUTAGE_S))
    world.network.losing = 0.0


async def _clock(world: World) -> None:
    """The wall clock jumps, in either direction."""
    jump_s = world.rng.uniform(-_JUMP_S, _JUMP_S)
    world.count("clock back" if jump_s < 0 else "clock forth")
    world.tell(f"clock jumps by {jump_s:.0f} s")
    world.loop.wall_offset_s += jump_s


async def _engine(world: World) -> None:
    """Generations fail, or engines break."""
    outside = world.outside
    outside.engine_failing, outside.engine_breaking = world.rng.choice(
        [(0.2, 0.0), (0.5, 0.0), (0.9, 0.0), (0.1, 0.1)]
    )
    world.tell(f"engines fail: {outside.engine_failing}, break: {outside.engine_breaking}")
    await asyncio.sleep(world.rng.uniform(0.5, _OUTAGE_S))
    outside.engine_failing = outside.engine_breaking = 0.0


async def _garbage(world: World) -> None:
    """Bytes that nobody of ours has written."""
    topic = world.rng.choice([TASKS_SHORT, TRAJECTORIES, REPLAY])
    key, value = world.rng.randbytes(8), world.rng.randbytes(40)
    world.tell(f"garbage on {topic.name}")
    partition = world.broker.partition_of(topic.name, key)
    record = Record(
        topic=topic.name,
        partition=partition,
        offset=-1,
        key=key,
        value=value,
        headers=(),
        timestamp_ms=0,
    )
    world.broker.append(topic.name, partition, record)


async def _damage(world: World) -> None:
    """A disk changes a bit of the next record of a topic; of a group, one trajectory at most."""
    topic = world.rng.choice([TASKS_SHORT, TRAJECTORIES, REPLAY])
    world.broker.damaging = topic.name


async def _repeat(world: World) -> None:
    """A record of the log once more at its end, as by a producer's second life."""
    topic = world.rng.choice([TASKS_SHORT, TRAJECTORIES, REPLAY])
    partition = world.rng.randrange(world.broker.partitions(topic.name))
    if rows := world.broker.log(topic.name, partition):
        world.tell(f"repeat on {topic.name}/{partition}")
        world.broker.append(topic.name, partition, replace(world.rng.choice(rows)))


FAULTS: dict[str, Fault] = {
    "kill": _kill,
    "cut": _cut,
    "pause": _pause,
    "stop": _stop,
    "join": _join,
    "store": _store,
    "slow": _slow,
    "full": _full,
    "hang": _hang,
    "broker": _broker,
    "loss": _loss,
    "clock": _clock,
    "engine": _engine,
    "garbage": _garbage,
    "repeat": _repeat,
    "damage": _damage,
}
