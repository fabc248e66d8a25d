"""The bus contract, through Kafka and through its in-process twin."""

from __future__ import annotations

import pytest

from rollstream.bus import Bus
from rollstream.bus.kafka import KafkaBus
from rollstream.testing import MemoryBroker, MemoryBus
from rollstream.testing.bus_suite import BusSuite
from tests.conftest import MakeConfig

# Kafka's retries are tested where Kafka is; here a missing topic is missing at once.
QUICK = ("bus.retry_budget_s=6.0", "bus.session_timeout_s=6.0")


class TestMemory(BusSuite):
    @pytest.fixture
    def bus(self, make_config: MakeConfig) -> Bus:
        return MemoryBus(make_config("none", *QUICK), MemoryBroker())


class TestKafka(BusSuite):
    @pytest.fixture
    def bus(self, kafka: str, make_config: MakeConfig) -> Bus:
        return KafkaBus(make_config(kafka, *QUICK))
