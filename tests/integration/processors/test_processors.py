"""The Faust service on a real Kafka: groups come out, broken events do not stop it, kills lose nothing."""

from __future__ import annotations

import asyncio
import signal
import subprocess

from processors.main import Processors
from rollstream import codecs
from rollstream.bus.kafka import KafkaBus
from rollstream.config import dump
from rollstream.supervisor.services import command, environment, spec_of
from rollstream.topics import ALL, DEAD_LETTERS, REPLAY, REWARDS, TRAJECTORIES
from rollstream.v1 import events_pb2
from tests.conftest import MakeConfig
from tests.property.test_pipeline import GROUP_SIZE, trajectory
from tests.services import read, running, send, send_bytes

DOMAIN = 'domains=[{name="d", environment="demo-arithmetic"}]'


def arrivals(groups: range) -> list[tuple[str, events_pb2.Trajectory]]:
    events = [trajectory(g, i, float(i % 2)) for g in groups for i in range(GROUP_SIZE)]
    return [(event.group_id, event) for event in events]


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


async def test_kills_lose_nothing_and_repeats_are_identical(
    kafka: str, make_config: MakeConfig
) -> None:
    config = make_config(kafka, DOMAIN, "bus.session_timeout_s=6", "log.level=warning")
    await KafkaBus(config).ensure_topics(ALL)
    config.run.dir.mkdir(parents=True)
    file = config.run.dir / "run.toml"
    file.write_text(dump(config))
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
        seen: dict[str, set[bytes]] = {}
        records: list = []  # type: ignore[type-arg]

        async def all_there() -> bool:
            records[:] = await read(config, REPLAY, count)
            seen.clear()
            for _, group in records:
                seen.setdefault(group.group_id, set()).add(codecs.encode(group))
            return len(seen) == count

        from tests.waiting import until

        await until(all_there, seconds=90)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
    assert all(len(versions) == 1 for versions in seen.values())
