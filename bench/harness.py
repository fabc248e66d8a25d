"""What suites share: a broker, a configuration, training samples that do not repeat."""

from __future__ import annotations

import contextlib
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from rollstream import codecs, ids
from rollstream.broker import EmbeddedCluster
from rollstream.config import Config, load
from rollstream.net import free_port
from rollstream.v1 import events_pb2

GROUP = 8
VOCABULARY = 150_000


@contextlib.contextmanager
def broker(count: int = 1) -> Iterator[str]:
    """Bootstrap servers of ``count`` embedded brokers that live as long as the block."""
    with tempfile.TemporaryDirectory() as folder:
        embedded = EmbeddedCluster(Path(folder), ports=[free_port() for _ in range(count)])
        embedded.start()
        try:
            yield embedded.bootstrap_servers
        finally:
            embedded.stop()


def config_for(servers: str, folder: str, *overrides: str) -> Config:
    """A configuration with a topic prefix of its own."""
    fixed = (
        "bus.mode=external",
        f"bus.bootstrap_servers={servers}",
        f'bus.topic_prefix="b{uuid.uuid4().hex[:8]}."',
        f'run.dir="{folder}"',
        "log.level=warning",
    )
    return load(overrides=(*fixed, *overrides), environ={})


def training_group(rng: np.random.Generator, number: int, length: int) -> events_pb2.TrainingGroup:
    """A group of 8 samples of ``length`` tokens with log-probabilities, all of it random."""
    samples = []
    for index in range(GROUP):
        tokens = codecs.make_sequence(
            rng.integers(0, VOCABULARY, length).astype(np.int32),
            rng.normal(-1.0, 0.5, length).astype(np.float32),
            sampled=[(0, length)],
            versions=[(0, 0, length)],
        )
        samples.append(
            events_pb2.TrainingSample(
                rollout_id=ids.rollout_id(str(number), index),
                sample_index=index,
                tokens=tokens,
                reward=float(rng.random()),
                advantage=float(rng.normal()),
            )
        )
    return events_pb2.TrainingGroup(
        header=codecs.header("bench", ids.event_id("TrainingGroup", number)),
        group_id=ids.group_id(str(number)),
        task_id=str(number),
        domain="bench",
        group_size=GROUP,
        samples=samples,
    )
