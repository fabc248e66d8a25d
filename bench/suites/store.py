"""Rows per second from Kafka into the store: the sink and the embedded store, one process each.

Trajectories of two turns and 256 random tokens with log-probabilities, their scores, and groups of
8: what a run writes. Counted from the first send to the last event in ``ingested``; sending is
several times faster than the sink.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from bench.harness import GROUP, VOCABULARY, broker, config_for
from bench.report import Report
from bench.services import service
from rollstream import codecs, ids
from rollstream.bus.kafka import KafkaBus
from rollstream.config import Config
from rollstream.net import free_port
from rollstream.topics import ALL, REPLAY, REWARDS, TRAJECTORIES
from rollstream.v1 import events_pb2

NAMES = ("sink.rows_per_s", "sink.rows_per_s.brokers3", "store.count_ms")
RUNS, GROUPS, TOKENS = 3, 800, 256
QUERIES = 30
# Per group: 8 x (trajectory, 2 turns, tokens), 8 scores, 8 samples and the group.
ROWS_PER_GROUP = GROUP * 4 + GROUP + GROUP + 1
EVENTS_PER_GROUP = GROUP * 2 + 1
_EVERY_S = 0.05
_DEADLINE_S = 300.0


def run(report: Report) -> None:
    for brokers, suffix in ((1, ""), (3, ".brokers3")):
        with sinking(brokers) as (config, client):
            rates = [asyncio.run(_measure(config, client, number)) for number in range(RUNS)]
            report.median(f"sink.rows_per_s{suffix}", rates, unit="rows/s")
            if brokers == 1:
                times = [_count(client) for _ in range(QUERIES)]
                report.median("store.count_ms", times, unit="ms")


@contextlib.contextmanager
def sinking(brokers: int) -> Iterator[tuple[Config, Any]]:
    """Brokers, store and sink, and a client of the store."""
    with broker(brokers) as servers, tempfile.TemporaryDirectory() as folder:
        settings = ("bus.partitions=4", f"bus.replication={brokers}", f"store.port={free_port()}")
        config = config_for(servers, folder, *settings)
        asyncio.run(KafkaBus(config).ensure_topics(ALL))
        with service("store", config), service("sink", config):
            yield config, _client(config)


def _client(config: Config) -> Any:
    from trajectories.client import store_client

    return store_client(config)


def _count(client: Any) -> float:
    began = time.perf_counter()
    client.query("SELECT domain, count(), avg(reward) FROM trajectories_scored GROUP BY domain")
    return (time.perf_counter() - began) * 1e3


async def _measure(config: Config, client: Any, number: int) -> float:
    producer = KafkaBus(config).producer(client_id="bench")
    await producer.start()
    groups = [_group(number * GROUPS + i) for i in range(GROUPS)]
    before = _ingested(client)
    began = time.perf_counter()
    for topic, index in ((TRAJECTORIES, 0), (REWARDS, 1), (REPLAY, 2)):
        events = [(e.group_id, e) for group in groups for e in group[index]]
        await producer.send_batch(topic, events)
    while _ingested(client) < before + GROUPS * EVENTS_PER_GROUP:
        if time.perf_counter() - began > _DEADLINE_S:
            raise RuntimeError(f"{_ingested(client) - before} events within {_DEADLINE_S:.0f} s")
        await asyncio.sleep(_EVERY_S)
    took = time.perf_counter() - began
    await producer.stop()
    return GROUPS * ROWS_PER_GROUP / took


def _ingested(client: Any) -> int:
    return int(client.query("SELECT sum(records) FROM ingested FINAL").result_rows[0][0])


def _group(
    number: int,
) -> tuple[
    list[events_pb2.Trajectory], list[events_pb2.ScoredTrajectory], list[events_pb2.TrainingGroup]
]:
    rng = np.random.default_rng(number)
    task_id = ids.task_id("bench", "bench", number, 0)
    trajectories = [_trajectory(rng, task_id, index) for index in range(GROUP)]
    scores = [_scored(t, float(rng.random())) for t in trajectories]
    samples = [
        events_pb2.TrainingSample(
            rollout_id=t.rollout_id,
            sample_index=t.sample_index,
            tokens=t.sequences[0],
            advantage=float(rng.normal()),
        )
        for t in trajectories
    ]
    group = events_pb2.TrainingGroup(
        header=codecs.header("bench", ids.event_id("TrainingGroup", task_id)),
        group_id=ids.group_id(task_id),
        task_id=task_id,
        domain="bench",
        group_size=GROUP,
        samples=samples,
    )
    return trajectories, scores, [group]


def _trajectory(rng: np.random.Generator, task_id: str, index: int) -> events_pb2.Trajectory:
    half = TOKENS // 2
    tokens = codecs.make_sequence(
        rng.integers(0, VOCABULARY, TOKENS).astype(np.int32),
        rng.normal(-1.0, 0.5, half).astype(np.float32),
        sampled=[(half, half)],
        versions=[(0, half, half)],
    )
    words = [rng.bytes(150).hex() for _ in range(2)]
    turns = [
        events_pb2.Turn(
            index=i,
            assistant=codecs.text_message(events_pb2.ROLE_ASSISTANT, text),
            finish_reason=events_pb2.FINISH_REASON_STOP,
        )
        for i, text in enumerate(words)
    ]
    return events_pb2.Trajectory(
        header=codecs.header("bench", ids.event_id("Trajectory", task_id, index)),
        rollout_id=ids.rollout_id(task_id, index),
        task_id=task_id,
        group_id=ids.group_id(task_id),
        sample_index=index,
        domain="bench",
        purpose=events_pb2.PURPOSE_TRAIN,
        group_size=GROUP,
        sequences=[tokens],
        turns=turns,
    )


def _scored(t: events_pb2.Trajectory, reward: float) -> events_pb2.ScoredTrajectory:
    return events_pb2.ScoredTrajectory(
        header=codecs.header("bench", ids.event_id("ScoredTrajectory", t.rollout_id)),
        rollout_id=t.rollout_id,
        task_id=t.task_id,
        group_id=t.group_id,
        domain=t.domain,
        purpose=t.purpose,
        raw=reward,
        validity=events_pb2.VALIDITY_VALID,
        sequences=t.sequences,
    )
