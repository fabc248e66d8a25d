"""Which bus a configuration means."""

from __future__ import annotations

from rollstream.bus.base import Bus
from rollstream.config import Config


def connect(config: Config) -> Bus:
    """The Kafka bus of ``config``. ``ConfigError`` when no bootstrap servers are known."""
    from rollstream.bus.kafka import KafkaBus

    return KafkaBus(config)
