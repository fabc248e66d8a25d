"""The embedded store and the sink: the ordinary client, exact counts after kills."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from typing import Any

import clickhouse_connect
import pytest
from clickhouse_connect.driver.exceptions import DatabaseError

from rollstream import codecs, ids
from rollstream.bus.kafka import KafkaBus
from rollstream.config import Config, dump, load
from rollstream.errors import InfraError
from rollstream.net import free_port
from rollstream.supervisor.services import command, environment, spec_of
from rollstream.topics import ALL, DEAD_LETTERS, TASKS_SHORT, TRAJECTORIES
from rollstream.v1 import events_pb2
from tests.conftest import MakeConfig
from tests.property.test_pipeline import trajectory
from tests.services import read, send, send_bytes
from tests.waiting import until
from trajectories.client import store_client


def test_the_ordinary_client_works(store: Config) -> None:
    client = store_client(store, database="default")
    client.command(
        "CREATE TABLE t (a Int32, b Array(Float32), m Map(String, Float64)) ENGINE = MergeTree ORDER BY a"
    )
    rows = [[1, [0.5, 1.5], {"x": 1.0}], [2, [], {}]]
    client.insert("t", rows, column_names=["a", "b", "m"])
    assert client.query("SELECT a, b, m FROM t ORDER BY a").result_rows == [
        (1, [0.5, 1.5], {"x": 1.0}),
        (2, [], {}),
    ]
    assert client.query("SELECT {n:Int32} + 1", parameters={"n": 41}).result_rows == [(42,)]
    with pytest.raises(DatabaseError, match="Unknown table"):
        client.query("SELECT * FROM nowhere")
    with pytest.raises(DatabaseError, match="Syntax error"):
        client.command("SELECT FROM WHERE")


async def test_the_async_client_works(store: Config) -> None:
    await asyncio.to_thread(store_client, store, database="default")
    client = await clickhouse_connect.get_async_client(
        host=store.store.host, port=store.store.port, autogenerate_session_id=False
    )
    answers = await asyncio.gather(*(client.query(f"SELECT {i}") for i in range(20)))
    assert [answer.result_rows for answer in answers] == [[(i,)] for i in range(20)]
    await client.close()


def test_a_repeated_insert_with_one_token_counts_once(store: Config) -> None:
    client = store_client(store, database="default")
    client.command(
        "CREATE TABLE t (a Int32) ENGINE = MergeTree ORDER BY a"
        " SETTINGS non_replicated_deduplication_window = 100"
    )
    for _ in range(3):
        client.insert(
            "t", [[1], [2]], column_names=["a"], settings={"insert_deduplication_token": "x"}
        )
    assert client.query("SELECT count() FROM t").result_rows == [(2,)]


def test_an_absent_store_is_named() -> None:
    port = free_port()
    config = load(overrides=[f"store.port={port}"], environ={})
    with pytest.raises(InfraError, match=rf"127.0.0.1:{port} does not answer.*service store up"):
        store_client(config, budget_s=0.5)


def tasks(count: int) -> list[tuple[str, events_pb2.Task]]:
    made = []
    for index in range(count):
        task_id = ids.task_id("run", "s", index, 0)
        made.append(
            events_pb2.Task(
                header=codecs.header("run", ids.event_id("Task", task_id)),
                task_id=task_id,
                group_id=ids.group_id(task_id),
                domain="d",
                purpose=events_pb2.PURPOSE_TRAIN,
                group_size=4,
            )
        )
    return [(task.task_id, task) for task in made]


async def test_the_sink_is_exact_after_kills(
    kafka: str, make_config: MakeConfig, store: Config
) -> None:
    config = make_config(
        kafka,
        f"store.port={store.store.port}",
        "store.chunk_records=50",
        "store.flush_interval_s=0.1",
        'run.id="run"',
    )
    await KafkaBus(config).ensure_topics(ALL)
    config.run.dir.mkdir(parents=True)
    file = config.run.dir / "run.toml"
    file.write_text(dump(config))
    groups, repeats = 300, 40
    events = [trajectory(g, i, float(i % 2)) for g in range(groups) for i in range(4)]
    keyed = [(event.group_id, event) for event in events]
    await send(config, TASKS_SHORT, tasks(groups))
    await send_bytes(config, TRAJECTORIES, "k", b"\xff\xff")
    feeding = asyncio.create_task(send(config, TRAJECTORIES, [*keyed, *keyed[:repeats]]))
    client = await asyncio.to_thread(_client, config)

    def rows(table: str) -> int:
        try:
            return int(client.query(f"SELECT count() FROM {table} FINAL").result_rows[0][0])
        except DatabaseError:
            return 0

    process = None
    try:
        for share in (0.2, 0.6):
            process = subprocess.Popen(command(spec_of("sink"), file), env=environment())
            await until(lambda s=share: rows("trajectories") > s * len(events), seconds=60)
            process.send_signal(signal.SIGKILL)
            process.wait()
        process = subprocess.Popen(command(spec_of("sink"), file), env=environment())
        await feeding
        await until(lambda: rows("trajectories") == len(events), seconds=60)
        await until(lambda: _ingested(client, TRAJECTORIES.name) == len(events) + repeats + 1)
    finally:
        if process is not None:
            process.send_signal(signal.SIGTERM)
            process.wait(30)
    assert (rows("tasks"), rows("tokens")) == (groups, len(events))
    # The broken record is counted, kept as a dead letter, and stops nothing.
    (letter,) = [event for _, event in await read(config, DEAD_LETTERS, 1)]
    assert (letter.topic, letter.value) == (TRAJECTORIES.name, b"\xff\xff")
    assert client.query("SELECT sum(broken) FROM ingested FINAL").result_rows == [(1,)]
    await _check_books(client, groups)


async def _check_books(client: Any, groups: int) -> None:
    from trajectories.accounting import balance, read_ledger

    books = balance(read_ledger(client, "run"))
    assert (books.produced, books.in_flight, books.problems) == (groups * 4, groups * 4, ())
    assert books.balanced


def _client(config: Config) -> Any:
    from trajectories.migrations import migrate

    root = store_client(config, database="default")
    root.command(f"CREATE DATABASE IF NOT EXISTS {config.store.database}")
    client = store_client(config)
    migrate(client, config.store.database)
    return client


def _ingested(client: Any, topic: str) -> int:
    query = "SELECT sum(records) FROM ingested FINAL WHERE _topic = {topic:String}"
    return int(client.query(query, parameters={"topic": topic}).result_rows[0][0])
