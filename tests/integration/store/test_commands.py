"""`rollstream sql` and `rollstream audit` on a small run whose store is not up; the views behind them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollstream import codecs, ids
from rollstream.config import Config
from rollstream.topics import (
    DEAD_LETTERS,
    REPLAY,
    REWARDS,
    TASKS_SHORT,
    TRAINING_STEPS,
    TRAJECTORIES,
    Topic,
)
from rollstream.v1 import events_pb2
from tests.integration.store.conftest import serving
from tests.integration.store.test_writer import decode, record_of
from tests.property.test_pipeline import trajectory
from trajectories.accounting import balance, read_ledger
from trajectories.chunks import Chunk
from trajectories.client import store_client
from trajectories.lengths import read_lengths
from trajectories.migrations import migrate
from trajectories.writer import ChunkWriter

GROUP_SIZE = 4


def task_id(number: int) -> str:
    return ids.task_id("run", "s", number, 0)


def rollout(number: int, index: int) -> str:
    return ids.rollout_id(task_id(number), index)


def task(number: int) -> events_pb2.Task:
    return events_pb2.Task(
        header=codecs.header("run", f"task{number}"),
        task_id=task_id(number),
        group_id=ids.group_id(task_id(number)),
        domain="d",
        purpose=events_pb2.PURPOSE_TRAIN,
        group_size=GROUP_SIZE,
    )


def group(number: int, *reasons: str, whole: str = "") -> events_pb2.TrainingGroup:
    return events_pb2.TrainingGroup(
        header=codecs.header("run", f"group{number}"),
        group_id=ids.group_id(task_id(number)),
        task_id=task_id(number),
        domain="d",
        group_size=GROUP_SIZE,
        drop_reason=whole,
        samples=[
            events_pb2.TrainingSample(
                rollout_id=rollout(number, i), sample_index=i, drop_reason=reason
            )
            for i, reason in enumerate(reasons)
        ],
    )


def step(number: int, *uses: tuple[int, int, str]) -> events_pb2.TrainingStep:
    return events_pb2.TrainingStep(
        header=codecs.header("run", f"step{number}"),
        step=number,
        samples=[
            events_pb2.SampleUse(
                rollout_id=rollout(g, i), group_id=ids.group_id(task_id(g)), drop_reason=reason,
                staleness=1,
            )
            for g, i, reason in uses
        ],
    )  # fmt: skip


def letter(number: int, index: int | None, event: str) -> events_pb2.DeadLetter:
    return events_pb2.DeadLetter(
        header=codecs.header("run", event),
        task_id=task_id(number),
        rollout_id="" if index is None else rollout(number, index),
        samples=GROUP_SIZE if index is None else 1,
    )


def scored(event: events_pb2.Trajectory) -> events_pb2.ScoredTrajectory:
    return events_pb2.ScoredTrajectory(
        header=event.header, rollout_id=event.rollout_id, task_id=event.task_id,
        group_id=event.group_id, domain="d", purpose=event.purpose, raw=0.5,
        validity=events_pb2.VALIDITY_VALID,
    )  # fmt: skip


TRAJECTORY = trajectory(0, 0, 1.0)
# Group 0 trained, with one stale and one invalid; 1 dropped whole; 2 dead-lettered whole; 3 open, one
# of its rollouts dead-lettered; 4 closed with a dead-lettered one missing, not yet at the trainer.
EVENTS: list[tuple[Topic, list[Any]]] = [
    (TASKS_SHORT, [task(n) for n in range(5)]),
    (TRAJECTORIES, [TRAJECTORY]),
    (REWARDS, [scored(TRAJECTORY)]),
    (
        REPLAY,
        [
            group(0, "", "", "", "invalid"),
            group(1, "", "", "", "", whole="zero_variance"),
            group(4, "", "", "", "missing"),
        ],
    ),
    (TRAINING_STEPS, [step(1, (0, 0, ""), (0, 1, ""), (0, 2, "stale"))]),
    (DEAD_LETTERS, [letter(2, None, "l1"), letter(3, 0, "l2"), letter(4, 3, "l3")]),
]
DROPPED = {"stale": 1, "invalid": 1, "zero_variance": 4}


def fill(client: Any, events: list[tuple[Topic, list[Any]]], *, start: int = 0) -> None:
    writer = ChunkWriter(client, log="log")
    for topic, messages in events:
        records = [record_of(topic.name, start + i, m) for i, m in enumerate(messages)]
        chunk = Chunk(topic=topic.name, partition=0, records=tuple(records))
        writer.write(chunk, writer.convert(chunk, decode))


def test_views_and_audit_keep_the_same_books(tables: Any) -> None:
    fill(tables, EVENTS)
    books = balance(read_ledger(tables, "run"))
    assert books.balanced, books.problems
    assert (books.produced, books.trained, books.dropped) == (20, 2, DROPPED)
    assert (books.dead_lettered, books.in_flight) == (4 + 1 + 1, 3 + 3)
    (view,) = tables.query("SELECT * FROM books").named_results()
    assert view == {
        "run_id": "run", "produced": 20, "trained": 2, "dropped": DROPPED, "dead_lettered": 6,
        "in_flight": 6,
    }  # fmt: skip
    found = tables.query(
        "SELECT rollout_id, state, drop_reason, step, staleness FROM samples"
        " WHERE task_id = {task:String} ORDER BY sample_index",
        parameters={"task": task_id(0)},
    ).result_rows
    assert found == [
        (rollout(0, 0), "trained", "", 1, 1),
        (rollout(0, 1), "trained", "", 1, 1),
        (rollout(0, 2), "dropped", "stale", 1, 1),
        (rollout(0, 3), "dropped", "invalid", None, None),
    ]


def test_lengths_of_what_was_trained_beside_what_was_finished(tables: Any) -> None:
    # Trained, trained, stale; without variance; closed but not yet at the trainer.
    lengths = {(0, 0): 10, (0, 1): 20, (0, 2): 60, (1, 0): 90, (4, 0): 30}
    told = []
    for (number, index), tokens in lengths.items():
        # The last attempt counts.
        for attempt, sampled in enumerate((tokens + 500, tokens)):
            told.append(trajectory(number, index, 1.0, attempt=attempt))
            told[-1].sampled_tokens = sampled
    others = [(topic, events) for topic, events in EVENTS if topic is not TRAJECTORIES]
    fill(tables, [(TRAJECTORIES, told), *others])
    found = read_lengths(tables, "run")
    assert (found.issued, found.trained) == (4, 2)
    assert (found.mean_issued, found.mean_trained) == (30.0, 15.0)
    assert found.statistic == 0.5


@pytest.mark.parametrize(
    ("topic", "event", "problem"),
    [
        (TRAINING_STEPS, step(2, (0, 0, "")), "trained in two steps"),
        (REPLAY, group(9, "", "", "", ""), "finished and never produced"),
        (REPLAY, group(3, "", ""), "not listed by their closed group"),
    ],
)
def test_a_contradiction_in_the_store_is_a_problem(
    tables: Any, topic: Topic, event: Any, problem: str
) -> None:
    fill(tables, EVENTS)
    fill(tables, [(topic, [event])], start=50)
    problems = balance(read_ledger(tables, "run")).problems
    assert any(problem in text for text in problems), problems
    # It stands at an offset that leaves a gap: the sink never wrote what was between.
    assert any(f"..49 of {topic.name}/0" in text for text in problems), problems


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run folder whose filled store is up."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    with serving(folder) as config:
        client = _database(config)
        fill(client, EVENTS)
        client.command("CREATE TABLE said (text String) ENGINE = MergeTree ORDER BY text")
        client.insert("said", [["[red]a[/b]\x1b[2J " + "long " * 60]], column_names=["text"])
        yield folder


def _database(config: Config) -> Any:
    root = store_client(config, database="default")
    root.command(f"CREATE DATABASE {config.store.database}")
    client = store_client(config)
    migrate(client, config.store.database)
    return client


def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rollstream", *arguments],
        capture_output=True, text=True, timeout=90, check=False, cwd=Path(__file__).parents[3],
    )  # fmt: skip


def test_sql_answers_in_every_format(run: Path) -> None:
    query = "select domain, count(), avg(reward) from trajectories_scored group by domain"
    table = ask("sql", query, "--run", str(run))
    assert [line.split() for line in table.stdout.splitlines()] == [
        ["domain", "count()", "avg(reward)"],
        ["d", "1", "0.5"],
    ]
    assert ask("sql", query, "--run", str(run), "-f", "csv").stdout.splitlines()[1] == "d,1,0.5"
    assert ask("sql", "select 1 as a, nan as b;", "--run", str(run), "-f", "json").stdout == (
        '{"a": 1, "b": null}\n'
    )
    assert ask("sql", "show tables like 'ingested'", "--run", str(run), "-f", "tsv").stdout == (
        "name\ningested\n"
    )


def test_what_a_model_wrote_is_shown_as_it_is(run: Path) -> None:
    shown = ask("sql", "select text from said", "--run", str(run)).stdout.splitlines()
    assert len(shown) == 2
    assert shown[1].startswith("[red]a[/b]\\x1b[2J long long")


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["sql", "select nothing from nowhere"], 1, "nowhere"),
        (["sql", "select from where"], 1, "Syntax error"),
        (["sql", "select 1", "-f", "xml"], 2, "known: table, json, csv, tsv"),
    ],
)
def test_errors_are_short_and_name_the_thing(
    run: Path, arguments: list[str], status: int, words: str
) -> None:
    done = ask(*arguments, "--run", str(run))
    assert (done.returncode, done.stdout) == (status, "")
    assert words in done.stderr
    assert len(done.stderr.splitlines()) <= 3


def test_audit_states_the_books(run: Path) -> None:
    stated = ask("audit", "--run", str(run), "--json")
    assert stated.returncode == 0, stated.stderr
    books = json.loads(stated.stdout)
    assert (books["produced"], books["dropped"], books["balanced"]) == (20, DROPPED, True)
    # One trajectory, which was trained.
    lengths = books["lengths"]
    assert (lengths["issued"], lengths["trained"], lengths["p_value"]) == (1, 1, 1.0)
    shown = ask("audit", "--run", str(run))
    assert shown.returncode == 0
    assert "dropped: zero_variance" in shown.stdout
    assert "balanced" in shown.stdout


def test_a_store_that_is_not_up_is_started_for_the_question(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with serving(folder) as config:
        client = _database(config)
        fill(client, EVENTS)
        fill(client, [(TRAINING_STEPS, [step(2, (0, 0, ""))])], start=1)
    audited = ask("audit", "--run", str(folder))
    assert audited.returncode == 1
    assert "trained in two steps" in audited.stdout
    assert "NOT balanced" in audited.stdout
    # It was stopped: the folder has no owner.
    with serving(folder) as config:
        assert store_client(config).query("SELECT trained FROM books").result_rows == [(2,)]


def test_runs_without_a_store_or_without_books_are_named(tmp_path: Path) -> None:
    absent = ask("sql", "select 1", "--run", str(tmp_path / "absent"))
    assert absent.returncode == 2
    assert "no run" in absent.stderr
    with serving(tmp_path / "empty") as config:
        store_client(config, database="default")
        empty = ask("audit", "--run", str(config.run.dir))
    assert empty.returncode == 1
    assert "refuses" in empty.stderr
    assert len(empty.stderr.splitlines()) <= 3
    (config.run.dir / "store").rename(tmp_path / "elsewhere")
    gone = ask("sql", "select 1", "--run", str(config.run.dir))
    assert gone.returncode == 2
    assert "has no store" in gone.stderr
