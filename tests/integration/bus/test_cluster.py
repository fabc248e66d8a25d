"""Three embedded brokers: every record on all of them, and one may die."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollstream.broker import EmbeddedCluster
from rollstream.bus.kafka import KafkaBus
from rollstream.config import Config, load
from rollstream.errors import ConfigError
from rollstream.supervisor.ports import broker_ports, resolve
from rollstream.topics import ALL, TASKS_SHORT
from tests.integration.bus.test_kafka import task
from tests.services import read, send

THREE = ("bus.brokers=3", "bus.replication=3", "bus.partitions=3", "bus.linger_ms=0")


def cluster_of(config: Config) -> EmbeddedCluster:
    return EmbeddedCluster(config.run.dir / "kafka", ports=broker_ports(config.bus))


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return resolve(load(overrides=[f'run.dir="{tmp_path}"', *THREE], environ={}))


@pytest.mark.timeout(240)
async def test_one_of_three_dies_and_nothing_is_lost(config: Config) -> None:
    cluster = cluster_of(config)
    cluster.start()
    events = [(f"t{i}", task(i)) for i in range(300)]
    try:
        bus = KafkaBus(config)
        assert await bus.ensure_topics(ALL) == []
        assert await bus.ensure_topics(ALL) == []
        await send(config, TASKS_SHORT, events[:100])
        for number in (0, 1):
            # Two in sync are enough to acknowledge; which of them leads changes.
            cluster.brokers[number].kill()
            await send(config, TASKS_SHORT, events[100 * (number + 1) :][:100])
            cluster.brokers[number].start()
        found = await read(config, TASKS_SHORT, len(events))
        log = await bus.cluster_id()
    finally:
        cluster.stop()
    assert sorted(e.task_id for _, e in found) == sorted(key for key, _ in events)

    # All of them anew, on other controller ports: the same log.
    again = cluster_of(config)
    again.start()
    try:
        assert len(await read(config, TASKS_SHORT, len(events))) == len(events)
        assert await KafkaBus(config).cluster_id() == log
    finally:
        again.stop()

    with pytest.raises(ConfigError, match=r"holds the log of three brokers.*bus.brokers=3"):
        EmbeddedCluster(config.run.dir / "kafka", ports=broker_ports(config.bus)[:1]).start()


def test_the_log_of_one_broker_is_not_given_to_three(config: Config) -> None:
    data = config.run.dir / "kafka" / "data"
    data.mkdir(parents=True)
    (data / "meta.properties").touch()
    with pytest.raises(ConfigError, match=r"holds the log of one broker.*bus.brokers=1"):
        cluster_of(config).start()


def test_ports_follow_the_first(config: Config) -> None:
    first = broker_ports(config.bus)[0]
    fixed = config.model_copy(update={"bus": config.bus.model_copy(update={"port": first})})
    assert broker_ports(resolve(fixed).bus) == [first, first + 1, first + 2]
