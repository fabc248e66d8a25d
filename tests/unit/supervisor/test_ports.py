"""Ports are fixed before anything starts; a taken one is named."""

from __future__ import annotations

import socket

import pytest

from rollstream.config import load
from rollstream.errors import ConfigError
from rollstream.supervisor.ports import resolve


def test_embedded_parts_get_distinct_ports_and_everyone_is_told() -> None:
    config = resolve(load(environ={}))
    ports = {config.bus.port, config.store.port, config.sandboxes.port}
    assert len(ports) == 3
    assert 0 not in ports
    assert config.bus.bootstrap_servers == f"127.0.0.1:{config.bus.port}"
    assert config.rollouts.sandbox_targets == (f"127.0.0.1:{config.sandboxes.port}",)


def test_external_parts_are_left_alone() -> None:
    overrides = [
        "bus.mode=external",
        "bus.bootstrap_servers=kafka:9092",
        "store.mode=external",
        "store.host=clickhouse",
        "store.port=8123",
        'rollouts.sandbox_targets=["executor:50051"]',
    ]
    config = resolve(load(overrides=overrides, environ={}))
    assert config.bus.bootstrap_servers == "kafka:9092"
    assert (config.store.host, config.store.port) == ("clickhouse", 8123)
    assert config.rollouts.sandbox_targets == ("executor:50051",)


def test_a_taken_port_is_named_with_its_key_and_the_remedy() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} \(store.port\).*in use.*store.port=0"):
            resolve(load(overrides=[f"store.port={port}"], environ={}))


def test_one_port_for_two_parts_is_refused() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(ConfigError, match="two parts"):
        resolve(load(overrides=[f"bus.port={port}", f"store.port={port}"], environ={}))
