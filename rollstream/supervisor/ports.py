"""Fixes the ports of a run before anything starts, so that one file tells every service where the
others are.
"""

from __future__ import annotations

import socket

from rollstream.config import Config
from rollstream.config.model import BusConfig
from rollstream.errors import ConfigError
from rollstream.net import LOOPBACK, free_port


def resolve(config: Config) -> Config:
    """``config`` with a port for each embedded part and the addresses that follow from them.

    Raises:
        ConfigError: a port that the configuration asks for is taken.
    """
    taken: set[int] = set()
    changes: dict[str, object] = {
        "run": config.run.model_copy(update={"dir": config.run.dir.resolve()})
    }
    if config.bus.mode == "embedded":
        first = config.bus.port
        ports = [
            _port("bus.port", first and first + number, taken)
            for number in range(config.bus.brokers)
        ]
        servers = ",".join(f"{LOOPBACK}:{port}" for port in ports)
        changes["bus"] = config.bus.model_copy(
            update={"port": ports[0], "bootstrap_servers": servers}
        )
    if config.store.mode == "embedded":
        port = _port("store.port", config.store.port, taken)
        changes["store"] = config.store.model_copy(update={"port": port, "host": LOOPBACK})
    if not config.rollouts.sandbox_targets:
        port = _port("sandboxes.port", config.sandboxes.port, taken)
        changes["sandboxes"] = config.sandboxes.model_copy(update={"port": port, "host": LOOPBACK})
        targets = (f"{LOOPBACK}:{port}",)
        changes["rollouts"] = config.rollouts.model_copy(update={"sandbox_targets": targets})
    return config.model_copy(update=changes)


def broker_ports(bus: BusConfig) -> list[int]:
    """The ports of the embedded brokers of a resolved configuration."""
    return [int(server.rpartition(":")[2]) for server in bus.bootstrap_servers.split(",")]


def _port(key: str, wanted: int, taken: set[int]) -> int:
    """``wanted``, or a free port when it is 0."""
    while True:
        port = _try_port(key, wanted)
        if port not in taken:
            taken.add(port)
            return port
        if wanted:
            raise ConfigError(f"{key}={wanted} is given to two parts", hint="use different ports")


def _try_port(key: str, wanted: int) -> int:
    if not wanted:
        return free_port()
    with socket.socket() as probe:
        # As the servers do: a connection of a previous run in TIME_WAIT does not count as taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, wanted))
        except OSError as error:
            raise ConfigError(
                f"port {wanted} ({key}) on {LOOPBACK} is in use: {error.strerror}",
                hint=f"stop what holds it, or set {key}=0 for a free one",
            ) from error
    return wanted
