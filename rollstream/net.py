"""Ports of this machine."""

from __future__ import annotations

import random
import socket
from pathlib import Path

LOOPBACK = "127.0.0.1"
_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 15_000
_TRIES = 100
_random = random.SystemRandom()


def free_port() -> int:
    """A port of loopback that nobody listens on, outside the range from which the kernel takes the
    ports of outgoing connections: a server that dies and comes again finds it free, and a client
    that tries meanwhile cannot be connected to itself.
    """
    try:
        first_outgoing = int(_RANGE_FILE.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError):
        first_outgoing = 32_768
    for _ in range(_TRIES if first_outgoing > _LOWEST else 0):
        port = _random.randrange(_LOWEST, first_outgoing)
        if _is_free(port):
            return port
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True
