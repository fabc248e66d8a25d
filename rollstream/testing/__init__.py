"""For tests, ours and those of plug-ins: the in-process twin of the bus, and the suites that every
implementation of a port is run through.
"""

from rollstream.testing.memory_broker import MemoryBroker
from rollstream.testing.memory_bus import MemoryBus, Network

__all__ = ["MemoryBroker", "MemoryBus", "Network"]
