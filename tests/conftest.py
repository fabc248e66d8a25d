"""Shared by all tests: one real broker per session, and a configuration of its own for each test."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollstream import vllm_needs
from rollstream.broker import EmbeddedBroker
from rollstream.config import Config, load
from rollstream.net import free_port

MakeConfig = Callable[..., Config]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """On a machine that cannot run vLLM its tests say why; in CI they fail there."""
    if item.get_closest_marker("vllm") and "CI" not in os.environ and (why := vllm_needs.why_not()):
        pytest.skip(why)


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Bootstrap servers of a real Apache Kafka."""
    broker = EmbeddedBroker(tmp_path_factory.mktemp("kafka"), port=free_port())
    broker.start()
    yield broker.bootstrap_servers
    broker.stop()


@pytest.fixture
def make_config(tmp_path: Path) -> MakeConfig:
    """``make_config(kafka, "key=value", ...)``: a run folder and a topic prefix of its own."""

    def make(servers: str, *overrides: str) -> Config:
        fixed = (
            f'run.dir="{tmp_path / "run"}"',
            "bus.mode=external",
            f"bus.bootstrap_servers={servers}",
            f'bus.topic_prefix="t{uuid.uuid4().hex[:8]}."',
            "bus.partitions=2",
            "bus.retry_budget_s=20.0",
        )
        return load(overrides=(*fixed, *overrides), environ={})

    return make
