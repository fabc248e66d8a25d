"""Chunks in the real store: every kind of event fits, and a crash between any two inserts changes nothing."""

from __future__ import annotations

import random
from collections.abc import Mapping
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollstream import codecs
from rollstream.bus import Record
from rollstream.errors import InfraError
from rollstream.topics import ALL, BY_NAME, REPLAY, REWARDS, TASKS_SHORT, TRAJECTORIES
from rollstream.v1 import events_pb2
from tests.golden.record import example
from tests.property.test_pipeline import trajectory
from trajectories import writer as writer_module
from trajectories.chunks import Chunk, ChunkBuilder
from trajectories.rows import COLUMNS
from trajectories.writer import ChunkWriter


def decode(record: Record) -> Any:
    return codecs.decode(BY_NAME[record.topic], record.value)


def record_of(topic: str, offset: int, event: Any) -> Record:
    return Record(
        topic=topic, partition=0, offset=offset, key=b"k", value=codecs.encode(event),
        headers=(), timestamp_ms=0,
    )  # fmt: skip


@pytest.mark.parametrize("topic", ALL, ids=lambda topic: topic.name)
def test_every_field_comes_back_as_it_was_written(tables: Any, topic: Any) -> None:
    writer = ChunkWriter(tables, log="log")
    chunk = Chunk(
        topic=topic.name, partition=0, records=(record_of(topic.name, 7, example(topic)),)
    )
    converted = writer.convert(chunk, decode)
    writer.write(chunk, converted)
    assert converted.broken == []
    for table, rows in converted.tables.items():
        columns = ", ".join(COLUMNS[table])
        found = tables.query(f"SELECT {columns} FROM {table} FINAL").result_rows
        assert [list(map(plain, row)) for row in found] == [list(map(plain, row)) for row in rows]
    assert writer.stored() == {(topic.name, 0): 7}


def plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, datetime):
        return value.timestamp()
    return value.decode() if isinstance(value, bytes) else value


def test_a_score_belongs_to_the_attempt_that_was_scored(tables: Any) -> None:
    writer = ChunkWriter(tables, log="log")
    first, again = trajectory(0, 1, 1.0, attempt=0), trajectory(0, 1, 0.0, attempt=3)
    again.sequences[0].versions[0].policy_version = 9
    first.policy_version_max, again.policy_version_max = 4, 9
    scored = events_pb2.ScoredTrajectory(
        header=codecs.header("run", "score"),
        rollout_id=first.rollout_id,
        group_id=first.group_id,
        raw=1.0,
        validity=events_pb2.VALIDITY_VALID,
    )
    for topic, events in ((TRAJECTORIES, [first, again]), (REWARDS, [scored])):
        records = tuple(record_of(topic.name, i, event) for i, event in enumerate(events))
        chunk = Chunk(topic=topic.name, partition=0, records=records)
        writer.write(chunk, writer.convert(chunk, decode))
    seen = tables.query("SELECT attempt, reward, policy_version_max FROM trajectories_scored")
    assert seen.result_rows == [(0, 1.0, 4)]
    # What was sampled and not used can still be asked for.
    assert tables.query("SELECT count() FROM trajectories FINAL").result_rows == [(2,)]


def test_bytes_of_a_dead_letter_are_kept(tables: Any) -> None:
    writer = ChunkWriter(tables, log="log")
    letters = [
        events_pb2.DeadLetter(header=codecs.header("run", f"e{i}"), value=value)
        for i, value in enumerate([b"text", b"\xff\x00\xfe", b""])
    ]
    records = tuple(record_of("dead-letters", i, letter) for i, letter in enumerate(letters))
    chunk = Chunk(topic="dead-letters", partition=0, records=records)
    writer.write(chunk, writer.convert(chunk, decode))
    found = tables.query("SELECT hex(value) FROM dead_letters FINAL ORDER BY event_id").result_rows
    assert [bytes.fromhex(digits) for (digits,) in found] == [b"text", b"\xff\x00\xfe", b""]


class Killed(BaseException):
    """What a process that dies does not catch."""


class Mortal:
    """A client that dies at one of its inserts, before it or (the answer is lost) after it."""

    def __init__(self, client: Any, *, dies_at: int, after: bool) -> None:
        self._client, self._left, self._after = client, dies_at, after
        self.query = client.query
        self.create_insert_context = client.create_insert_context

    def insert(self, *arguments: Any, **options: Any) -> Any:
        self._left -= 1
        if not self._left and not self._after:
            raise Killed
        summary = self._client.insert(*arguments, **options)
        if not self._left:
            raise Killed
        return summary


def live(client: Any, log: list[Record], size: int) -> None:
    """One life of a sink: go on after the last stored line, in chunks of ``size``."""
    writer = ChunkWriter(client, log="log")
    start = writer.stored().get((log[0].topic, 0), -1) + 1
    builder = ChunkBuilder(size=size, limit_bytes=1 << 30)
    chunks = [chunk for record in log[start:] for chunk in builder.add(record)]
    for chunk in [*chunks, *builder.flush()]:
        writer.write(chunk, writer.convert(chunk, decode))


def count(client: Any, table: str, *, final: bool = True) -> int:
    query = f"SELECT count() FROM {table} {'FINAL' if final else ''}"
    return int(client.query(query).result_rows[0][0])


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("dies_at", [1, 2, 3, 4])
def test_a_life_that_ends_between_two_inserts_is_repeated_to_no_effect(
    tables: Any, dies_at: int, after: bool
) -> None:
    log = [record_of(TRAJECTORIES.name, i, with_turns(trajectory(i, 0, 1.0))) for i in range(20)]
    with pytest.raises(Killed):
        live(Mortal(tables, dies_at=dies_at, after=after), log, size=10)
    live(tables, log, size=10)
    found = {t: count(tables, t, final=False) for t in ("trajectories", "tokens", "turns")}
    assert found == {"trajectories": 20, "tokens": 20, "turns": 40}
    assert count(tables, "ingested", final=False) == 2


@pytest.mark.parametrize("seed", range(4))
def test_many_lives_that_cut_the_log_differently(tables: Any, seed: int) -> None:
    random_ = random.Random(seed)
    log = [record_of(REPLAY.name, i, group(i)) for i in range(40)]
    for _ in range(25):
        mortal = Mortal(tables, dies_at=random_.randint(1, 7), after=random_.random() < 0.5)
        try:
            live(mortal, log, size=random_.randint(1, 9))
        except Killed:
            continue
    live(tables, log, size=7)
    assert (count(tables, "groups"), count(tables, "group_samples")) == (40, 160)
    lines = tables.query("SELECT first, last, records FROM ingested FINAL ORDER BY first")
    assert contiguous(lines.result_rows, 40)


def contiguous(lines: Any, end: int) -> bool:
    """Whether the lines of the commit log cover every offset below ``end`` once."""
    expected = 0
    for first, last, records in lines:
        if first != expected or records != last - first + 1:
            return False
        expected = last + 1
    return bool(expected == end)


def with_turns(event: events_pb2.Trajectory) -> events_pb2.Trajectory:
    event.turns.add(index=0, assistant=codecs.text_message(events_pb2.ROLE_ASSISTANT, "a"))
    event.turns.add(index=1, assistant=codecs.text_message(events_pb2.ROLE_ASSISTANT, "b"))
    return event


def group(number: int) -> events_pb2.TrainingGroup:
    samples: Mapping[int, events_pb2.Trajectory] = {i: trajectory(number, i, 1.0) for i in range(4)}
    first = samples[0]
    return events_pb2.TrainingGroup(
        header=codecs.header("run", f"e{number}"),
        group_id=first.group_id,
        task_id=first.task_id,
        group_size=4,
        samples=[
            events_pb2.TrainingSample(rollout_id=t.rollout_id, sample_index=i)
            for i, t in samples.items()
        ],
    )


def test_a_record_that_no_rows_can_be_made_of_is_broken_and_the_rest_is_stored(
    tables: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = [record_of("tasks.short", n, example(TASKS_SHORT)) for n in range(3)]
    chunk = Chunk(topic="tasks.short", partition=0, records=tuple(events))
    real = writer_module.rows_of

    def fails_once(event: Any, origin: Any) -> Any:
        if origin.offset == 1:
            raise KeyError("a bug")
        return real(event, origin)

    monkeypatch.setattr(writer_module, "rows_of", fails_once)
    writer = ChunkWriter(tables, log="log")
    converted = writer.convert(chunk, decode)
    writer.write(chunk, converted)
    ((record, error),) = converted.broken
    assert (record.offset, "tasks.short/0/1" in str(error), "KeyError" in str(error)) == (
        1,
        True,
        True,
    )
    assert writer.stored() == {("tasks.short", 0): 2}


def test_rows_that_the_store_did_not_take_are_missed(
    tables: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = Chunk(
        topic="tasks.short",
        partition=0,
        records=(record_of("tasks.short", 0, example(TASKS_SHORT)),),
    )
    writer = ChunkWriter(tables, log="log")
    converted = writer.convert(chunk, decode)
    monkeypatch.setattr(tables, "insert", lambda *_, **__: SimpleNamespace(written_rows=0))
    with pytest.raises(InfraError, match="the store took 0 of 1 rows for tasks"):
        writer.write(chunk, converted)
    monkeypatch.undo()
    assert writer.stored() == {}
