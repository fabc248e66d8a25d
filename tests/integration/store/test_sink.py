"""The sink as a service: a store that goes and comes, runs that share a broker, logs that became shorter."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from rollstream import codecs, ids
from rollstream.bus.kafka import KafkaBus
from rollstream.config import Config
from rollstream.errors import ConfigError
from rollstream.net import free_port
from rollstream.topics import ALL, DEAD_LETTERS, TASKS_SHORT
from rollstream.v1 import events_pb2
from tests.conftest import MakeConfig
from tests.integration.store.conftest import serving
from tests.services import read, running, send
from tests.waiting import until
from trajectories.client import store_client
from trajectories.sink_main import Sink


def tasks(run: str, start: int, count: int) -> list[tuple[str, events_pb2.Task]]:
    made = []
    for index in range(start, start + count):
        task_id = ids.task_id(run, "s", index, 0)
        header = codecs.header(run, ids.event_id("Task", task_id))
        task = events_pb2.Task(header=header, task_id=task_id, group_id=ids.group_id(task_id))
        made.append((task_id, task))
    return made


def sink_config(make_config: MakeConfig, kafka: str, port: int, *more: str) -> Config:
    return make_config(kafka, f"store.port={port}", "store.flush_interval_s=0.1", *more)


def stored(client: Any, run: str) -> int:
    query = "SELECT count() FROM tasks WHERE run_id = {run:String}"
    return int(client.query(query, parameters={"run": run}).result_rows[0][0])


async def test_a_store_that_goes_and_comes_loses_nothing(
    kafka: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = sink_config(make_config, kafka, free_port(), "store.chunk_records=20")
    await KafkaBus(config).ensure_topics(ALL)
    with contextlib.ExitStack() as stores:

        def start() -> None:
            stores.enter_context(serving(tmp_path / "store", port=config.store.port))

        start()
        async with running(Sink, config) as sink:
            await send(config, TASKS_SHORT, tasks("run", 0, 100))
            await until(lambda: sink.stats()["records_total"] == 100)
            stores.close()
            await send(config, TASKS_SHORT, tasks("run", 100, 300))
            start()
            await until(lambda: sink.stats()["records_total"] == 400)
        assert stored(store_client(config), "run") == 400


async def test_runs_that_share_a_broker_and_a_database_are_kept_apart(
    kafka: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    with serving(tmp_path / "store") as store:
        for run in ("first", "second"):
            config = sink_config(make_config, kafka, store.store.port)
            await KafkaBus(config).ensure_topics(ALL)
            async with running(Sink, config) as sink:
                await send(config, TASKS_SHORT, tasks(run, 0, 50))
                await until(lambda s=sink: s.stats()["records_total"] == 50)
        client = store_client(store)
        assert (stored(client, "first"), stored(client, "second")) == (50, 50)


async def test_a_log_that_became_shorter_is_refused(
    kafka: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    with serving(tmp_path / "store") as store:
        config = sink_config(make_config, kafka, store.store.port)
        bus = KafkaBus(config)
        await bus.ensure_topics(ALL)
        async with running(Sink, config):
            pass
        log = f"{await bus.cluster_id()}:{config.bus.topic_prefix}"
        store_client(store).insert(
            "ingested", [[log, TASKS_SHORT.name, 0, 0, 99, 100]],
            column_names=["_log", "_topic", "_partition", "first", "last", "records"],
        )  # fmt: skip
        with pytest.raises(ConfigError, match=r"tasks.short/0 ends at offset 0 .* up to 99"):
            async with running(Sink, config):
                pass


async def test_a_value_that_no_column_holds_is_a_dead_letter(
    kafka: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    good, late, huge = (event for _, event in tasks("run", 0, 3))
    late.header.occurred_at.seconds = 10**17
    huge.group_size = 10**9
    with serving(tmp_path / "store") as store:
        config = sink_config(make_config, kafka, store.store.port)
        await KafkaBus(config).ensure_topics(ALL)
        async with running(Sink, config) as sink:
            await send(config, TASKS_SHORT, [("k", late), ("k", huge), ("k", good)])
            # The two letters come back to the sink and are stored like any event.
            await until(lambda: sink.stats()["records_total"] == 5)
            assert sink.stats()["broken_total"] == 2
        letters = [event for _, event in await read(config, DEAD_LETTERS, 2)]
        assert ["no time" in x.error or "1000000000 rollouts" in x.error for x in letters] == [
            True
        ] * 2
        client = store_client(store)
        assert stored(client, "run") == 1
        found = client.query(
            "SELECT value FROM dead_letters FINAL", column_formats={"value": "bytes"}
        )
        values = {bytes(value) for (value,) in found.result_rows}
        assert values == {codecs.encode(late), codecs.encode(huge)}
