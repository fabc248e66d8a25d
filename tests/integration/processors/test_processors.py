"""The Faust service on a real Kafka: groups come out, broken events do not stop it, kills lose nothing."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from pathlib import Path

from processors.main import Processors
from rollstream import codecs
from rollstream.bus.kafka import KafkaBus
from rollstream.config import Config, dump
from rollstream.supervisor.services import command, environment, spec_of
from rollstream.topics import ALL, DEAD_LETTERS, REPLAY, REWARDS, TRAJECTORIES
from rollstream.v1 import events_pb2
from tests.conftest import MakeConfig
from tests.property.test_pipeline import GROUP_SIZE, trajectory
from tests.services import read, running, send, send_bytes
from tests.waiting import until

DOMAIN = 'domains=[{name="d", environment="demo-arithmetic"}]'


def arrivals(groups: range) -> list[tuple[str, events_pb2.Trajectory]]:
    events = [trajectory(g, i, float(i % 2)) for g in groups for i in range(GROUP_SIZE)]
    return [(event.group_id, event) for event in events]


def waiting(groups: range) -> list[tuple[str, events_pb2.Trajectory]]:
    """All but one sample of each group, of now."""
    events = arrivals(groups)
    for _, event in events:
        event.header.occurred_at.GetCurrentTime()
    return [(key, event) for key, event in events if event.sample_index < GROUP_SIZE - 1]


def written(config: Config) -> Path:
    """The configuration as a file, for a process of its own."""
    config.run.dir.mkdir(parents=True)
    file = config.run.dir / "run.toml"
    file.write_text(dump(config))
    return file


async def test_trajectories_become_rewards_and_groups(kafka: str, make_config: MakeConfig) -> None:
    config = make_config(kafka, DOMAIN)
    await KafkaBus(config).ensure_topics(ALL)
    async with running(Processors, config) as service:
        await send(config, TRAJECTORIES, arrivals(range(5)))
        groups = await read(config, REPLAY, 5)
        rewards = await read(config, REWARDS, 5 * GROUP_SIZE)
        assert service.stats()["groups_open"] == 0
    assert len({g.group_id for _, g in groups}) == 5
    for _, group in groups:
        assert [s.reward for s in group.samples] == [0.0, 1.0, 0.0, 1.0]
        assert abs(sum(s.advantage for s in group.samples)) < 1e-9
    assert len({r.rollout_id for _, r in rewards}) == 5 * GROUP_SIZE


async def test_broken_events_become_dead_letters_and_the_rest_goes_on(
    kafka: str, make_config: MakeConfig
) -> None:
    config = make_config(kafka, DOMAIN, "bus.partitions=1")
    await KafkaBus(config).ensure_topics(ALL)
    unknown = trajectory(100, 0, 1.0)
    unknown.domain = "nowhere"
    infinite = trajectory(101, 0, float("nan"))
    async with running(Processors, config):
        await send_bytes(config, TRAJECTORIES, "k", b"\xff\xff")
        await send(config, TRAJECTORIES, [(unknown.group_id, unknown)])
        await send(config, TRAJECTORIES, [(infinite.group_id, infinite)])
        await send(config, TRAJECTORIES, arrivals(range(1)))
        await read(config, REPLAY, 1)
        letters = [letter for _, letter in await read(config, DEAD_LETTERS, 3)]
    undecodable, domain, nan = letters
    assert (undecodable.value, undecodable.offset) == (b"\xff\xff", 0)
    assert "not a Trajectory" in undecodable.error
    assert "unknown domain 'nowhere'" in domain.error
    assert "known: d" in domain.hint
    assert (domain.rollout_id, domain.samples) == (unknown.rollout_id, 1)
    assert "is nan" in nan.error
    # The original bytes: it can be driven again.
    assert domain.value == codecs.encode(unknown)


async def test_a_consumer_that_stops_consuming_has_work_and_does_none(
    kafka: str, make_config: MakeConfig
) -> None:
    config = make_config(kafka, DOMAIN)
    await KafkaBus(config).ensure_topics(ALL)
    async with running(Processors, config) as service:
        await send(config, TRAJECTORIES, arrivals(range(3)))
        await read(config, REPLAY, 3)
        done = 3 * GROUP_SIZE

        async def idle() -> bool:
            progress = await service.progress()
            return progress is not None and (progress.waiting, progress.done) == (0, done)

        await until(idle, seconds=60)
        # As after an outage: the agents live and take nothing.
        assert service._processor is not None
        service._processor.app.flow_control.suspend()
        await send(config, TRAJECTORIES, arrivals(range(3, 5)))
        progress = await service.progress()
        assert progress is not None
        assert (progress.waiting, progress.done) == (2 * GROUP_SIZE, done)


async def test_an_incomplete_group_closes_at_its_deadline(
    kafka: str, make_config: MakeConfig
) -> None:
    config = make_config(kafka, DOMAIN, "processors.group_deadline_s=2")
    await KafkaBus(config).ensure_topics(ALL)
    async with running(Processors, config):
        await send(config, TRAJECTORIES, arrivals(range(1))[:3])
        ((_, group),) = await read(config, REPLAY, 1)
    assert group.close_reason == events_pb2.CLOSE_REASON_DEADLINE
    assert [s.drop_reason for s in group.samples] == ["", "", "", "missing"]


async def test_whoever_takes_over_a_partition_closes_its_waiting_groups(
    kafka: str, make_config: MakeConfig
) -> None:
    config = make_config(kafka, DOMAIN, "bus.session_timeout_s=6", "processors.group_deadline_s=15")
    await KafkaBus(config).ensure_topics(ALL)
    first = subprocess.Popen(command(spec_of("processors"), written(config)), env=environment())
    try:
        await send(config, TRAJECTORIES, waiting(range(8)))
        await read(config, REWARDS, 8 * (GROUP_SIZE - 1), seconds=90)
        async with running(Processors, config):
            first.kill()
            groups = await read(config, REPLAY, 8, seconds=90)
    finally:
        first.kill()
        first.wait()
    assert {group.close_reason for _, group in groups} == {events_pb2.CLOSE_REASON_DEADLINE}
    assert {group.samples[-1].drop_reason for _, group in groups} == {"missing"}


async def test_kills_lose_nothing_and_repeats_are_identical(
    kafka: str, make_config: MakeConfig
) -> None:
    # Queues that are full at each start: what Faust throws away then is seen here.
    small = "processors.batch_records=64"
    config = make_config(kafka, DOMAIN, "bus.session_timeout_s=6", "log.level=warning", small)
    await KafkaBus(config).ensure_topics(ALL)
    file = written(config)
    count = 600

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command(spec_of("processors"), file), env=environment())

    feeding = asyncio.create_task(send(config, TRAJECTORIES, arrivals(range(count))))
    try:
        for wanted in (count // 6, count // 2):
            process = start()
            await read(config, REPLAY, wanted, seconds=90)
            process.send_signal(signal.SIGKILL)
            process.wait()
        process = start()
        await feeding
        seen = await _versions(config, count)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
    assert all(len(versions) == 1 for versions in seen.values())


async def _versions(config: Config, count: int) -> dict[str, set[bytes]]:
    """What was emitted of each group, once ``count`` groups are there and no more come."""
    bus = KafkaBus(config)
    consumer = bus.consumer([REPLAY], client_id="test-reader")
    await consumer.start()
    seen: dict[str, set[bytes]] = {}

    async def all_there() -> bool:
        records = await consumer.poll(timeout_s=1.0)
        for group in map(bus.decode, records):
            assert isinstance(group, events_pb2.TrainingGroup)
            seen.setdefault(group.group_id, set()).add(codecs.encode(group))
        return len(seen) == count and not records

    try:
        await until(all_there, seconds=90)
    finally:
        await consumer.stop()
    return seen
