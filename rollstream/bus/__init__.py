"""The bus: Kafka behind a small port, and its in-process twin."""

from rollstream.bus.base import Bus, Consumer, Position, Producer, Record
from rollstream.bus.connect import connect

__all__ = ["Bus", "Consumer", "Position", "Producer", "Record", "connect"]
