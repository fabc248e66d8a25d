"""Topics against store, on a real broker and a real store."""

from __future__ import annotations

from pathlib import Path

from rollstream.bus.kafka import KafkaBus
from rollstream.topics import ALL, TASKS_SHORT
from tests.conftest import MakeConfig
from tests.integration.store.conftest import serving
from tests.integration.store.test_sink import sink_config, tasks
from tests.services import running, send
from tests.waiting import until
from trajectories.client import store_client
from trajectories.logs import compare, read_logs, read_stored
from trajectories.sink_main import Sink


async def test_lag_and_another_log_are_told_apart(
    kafka: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    with serving(tmp_path / "store") as store:
        config = sink_config(make_config, kafka, store.store.port)
        await KafkaBus(config).ensure_topics(ALL)
        async with running(Sink, config) as sink:
            await send(config, TASKS_SHORT, tasks("run", 0, 50))
            await until(lambda: sink.stats()["records_total"] == 50)
        client = store_client(store)
        log, logs = await read_logs(config)
        sound = compare(log, logs, read_stored(client, log), settled=True)
        assert (sound.lag, sound.problems) == ({}, ())
        assert sum(end for _, end in logs.values()) == 50

        await send(config, TASKS_SHORT, tasks("run", 50, 7))
        log, logs = await read_logs(config)
        behind = compare(log, logs, read_stored(client, log), settled=False)
        assert (sum(behind.lag.values()), behind.problems) == (7, ())
        assert compare(log, logs, read_stored(client, log), settled=True).problems

        client.insert(
            "ingested",
            [[log, TASKS_SHORT.name, 0, 1000, 2000, 1001, 0]],
            column_names=["_log", "_topic", "_partition", "first", "last", "records", "broken"],
        )
        ahead = compare(log, logs, read_stored(client, log), settled=False)
        assert ["made anew" in problem for problem in ahead.problems] == [True]
