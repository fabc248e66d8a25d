"""The store service in a process of its own, and databases on it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollstream.config import Config, dump, load
from rollstream.net import free_port
from rollstream.supervisor.services import command, environment, spec_of
from trajectories.client import store_client
from trajectories.migrations import migrate


@contextlib.contextmanager
def serving(folder: Path, *, port: int = 0) -> Iterator[Config]:
    """A store on ``folder``; it ends well."""
    folder.mkdir(exist_ok=True)
    port = port or free_port()
    config = load(overrides=[f'run.dir="{folder}"', f"store.port={port}"], environ={})
    file = folder / "config.toml"
    file.write_text(dump(config))
    process = subprocess.Popen(command(spec_of("store"), file), env=environment())
    try:
        yield config
    finally:
        process.send_signal(signal.SIGTERM)
        status = process.wait(30)
    assert status == 0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Config]:
    with serving(tmp_path / "store-run") as config:
        yield config


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Config]:
    with serving(tmp_path_factory.mktemp("store") / "run") as config:
        yield config


@pytest.fixture
def client(shared_store: Config, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The ordinary client, in an empty database of its own."""
    root = store_client(shared_store, database="default")
    name = f"d{abs(hash(request.node.nodeid)):x}"
    root.command(f"CREATE DATABASE `{name}`")
    yield store_client(shared_store, database=name)
    root.command(f"DROP DATABASE `{name}`")


@pytest.fixture
def tables(client: Any) -> Any:
    """The ordinary client, in a database with the schema."""
    migrate(client, client.database)
    return client
