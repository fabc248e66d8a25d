"""Every event becomes rows that fit their tables; chunks never cross their boundaries."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.bus import Record
from rollstream.errors import ConfigError
from rollstream.topics import ALL
from tests.golden.record import example
from trajectories.chunks import ChunkBuilder
from trajectories.migrations import Migration, available, migrate
from trajectories.rows import COLUMNS, Origin, rows_of


@pytest.mark.parametrize("topic", ALL, ids=lambda topic: topic.name)
def test_rows_have_the_columns_of_their_table(topic) -> None:  # type: ignore[no-untyped-def]
    origin = Origin(log="log", topic=topic.name, partition=3, offset=7)
    rows = rows_of(example(topic), origin)
    assert rows
    for table, row in rows:
        assert len(row) == len(COLUMNS[table]), table
    # The main table, which carries the origin, is written last.
    main_table, main_row = rows[-1]
    assert main_row[-4:] == ("log", topic.name, 3, 7)
    assert COLUMNS[main_table][-4:] == ("_log", "_topic", "_partition", "_offset")


def _record(offset: int) -> Record:
    return Record(
        topic="t", partition=0, offset=offset, key=b"", value=b"x" * 10, headers=(), timestamp_ms=0
    )


@given(
    gaps=st.lists(st.integers(1, 4), min_size=1, max_size=60),
    size=st.integers(1, 10),
    flushes=st.sets(st.integers(0, 60)),
)
def test_chunks_cover_the_log_once_and_stay_aligned(
    gaps: list[int], size: int, flushes: set[int]
) -> None:
    offsets = [sum(gaps[: i + 1]) for i in range(len(gaps))]
    builder, chunks = ChunkBuilder(size=size, limit_bytes=10_000), []
    for position, offset in enumerate(offsets):
        chunks += builder.add(_record(offset))
        if position in flushes:
            chunks += builder.flush()
    chunks += builder.flush()
    assert [r.offset for chunk in chunks for r in chunk.records] == offsets
    assert all(chunk.first // size == chunk.last // size for chunk in chunks)
    assert len({chunk.token("log") for chunk in chunks}) == len(chunks)


def test_a_chunk_closes_at_its_bytes() -> None:
    builder = ChunkBuilder(size=1000, limit_bytes=25)
    assert [len(c.records) for o in range(6) for c in builder.add(_record(o))] == [3, 3]


class FakeClient:
    """Remembers commands and inserts; answers with what was applied."""

    def __init__(self, applied: dict[str, str]) -> None:
        self.applied, self.commands = applied, []

    def command(self, text: str) -> None:
        self.commands.append(text)

    def query(self, text: str):  # type: ignore[no-untyped-def]
        return type("Result", (), {"result_rows": list(self.applied.items())})

    def insert(self, table: str, rows: list, column_names: list) -> None:  # type: ignore[type-arg]
        self.applied.update(dict(rows))


def test_migrations_are_applied_once_and_may_not_change() -> None:
    client = FakeClient({})
    names = [m.name for m in available()]
    assert migrate(client, "db") == names
    assert migrate(client, "db") == []
    client.applied[names[0]] = "another checksum"
    with pytest.raises(ConfigError, match=rf"{names[0]} was applied in another form"):
        migrate(client, "db")


def test_statements_are_split_without_their_comments() -> None:
    sql = "-- a; comment\nCREATE TABLE a (x Int8); -- tail\nCREATE TABLE b (y Int8);\n"
    assert Migration(name="x", sql=sql).statements == [
        "CREATE TABLE a (x Int8)",
        "CREATE TABLE b (y Int8)",
    ]
