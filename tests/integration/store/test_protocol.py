"""ClickHouse's HTTP protocol as the ordinary clients speak it: values, formats, bodies, errors."""

from __future__ import annotations

import datetime
import gzip
import subprocess
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections.abc import Callable
from typing import Any

import clickhouse_connect
import lz4.frame
import pytest
from backports import zstd
from clickhouse_connect.driver.exceptions import DatabaseError

from rollstream.config import Config
from rollstream.errors import InfraError
from rollstream.supervisor.services import command, environment, spec_of
from trajectories.client import store_client


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("String", "it's \\ and \t and \n and é and {x} and \\N"),
        ("String", ""),
        ("Array(String)", ["a'b", "c\\", "d\ne"]),
        ("Nullable(String)", None),
        ("DateTime64(6)", datetime.datetime(2026, 1, 2, 3, 4, 5, 678)),
        ("UInt64", 2**64 - 1),
    ],
)
def test_parameters_arrive_as_they_were_sent(client: Any, kind: str, value: object) -> None:
    found = client.query(f"SELECT {{v:{kind}}}", parameters={"v": value}).result_rows
    assert found == [(value,)]


def test_parameters_and_query_may_come_as_a_form(shared_store: Config) -> None:
    store = shared_store.store
    store_client(shared_store, database="default")
    forms = clickhouse_connect.get_client(
        host=store.host, port=store.port, form_encode_query_params=True
    )
    long = "it's " + "x" * 100_000
    assert forms.query("SELECT {v:String}", parameters={"v": long}).result_rows == [(long,)]


def test_settings_hold_for_their_query_alone(client: Any) -> None:
    with pytest.raises(DatabaseError, match="Limit for result exceeded"):
        client.query("SELECT number FROM numbers(3)", settings={"max_result_rows": 2})
    assert client.query("SELECT count() FROM numbers(3)").result_rows == [(3,)]
    assert len(client.query("SELECT number FROM numbers(3)").result_rows) == 3


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress, "deflate": zlib.compress, "lz4": lz4.frame.compress,
    "zstd": zstd.compress,
}  # fmt: skip


def test_inserts_in_any_format_and_compression(client: Any) -> None:
    client.command("CREATE TABLE t (a Int32, s String) ENGINE = MergeTree ORDER BY a")
    for name, compress in COMPRESS.items():
        body = compress(f"1,{name}\n".encode())
        client.raw_insert("t", ["a", "s"], body, fmt="CSV", compression=name)
    client.raw_insert("t", ["a", "s"], b'{"a": 2, "s": "json"}\n', fmt="JSONEachRow")
    client.insert("t", [[3, "native"]], column_names=["a", "s"])
    client.command("INSERT INTO t VALUES (4, 'values')")
    client.command("INSERT INTO t SELECT 5, 'select'")
    found = client.query("SELECT s FROM t ORDER BY a, s").result_rows
    assert [s for (s,) in found] == [*sorted(COMPRESS), "json", "native", "values", "select"]


def test_a_large_insert_is_one_block_and_says_how_many_rows(client: Any) -> None:
    client.command("CREATE TABLE t (a Array(Int32)) ENGINE = MergeTree ORDER BY tuple()")
    summary = client.insert("t", [[list(range(500))]] * 10_000, column_names=["a"])
    assert summary.written_rows == 10_000
    assert client.query("SELECT count(), sum(length(a)) FROM t").result_rows == [
        (10_000, 5_000_000)
    ]


def test_an_insert_of_many_frames_is_stored_whole(client: Any) -> None:
    client.command("CREATE TABLE t (a UInt32, s String) ENGINE = MergeTree ORDER BY a")
    halves = [b"".join(b"%d,x\n" % i for i in half) for half in (range(500), range(500, 1000))]
    for name, compress in COMPRESS.items():
        client.command("TRUNCATE TABLE t")
        # The client compresses each block by itself.
        body = b"".join(map(compress, halves))
        client.raw_insert("t", ["a", "s"], body, fmt="CSV", compression=name)
        found = client.query("SELECT count(), min(a), max(a) FROM t").result_rows
        assert found == [(1000, 0, 999)], name
        with pytest.raises(DatabaseError, match="the body is not"):
            client.raw_insert("t", ["a", "s"], body[:-9], fmt="CSV", compression=name)
    rows = [[i, f"{i:050}"] for i in range(200_000)]
    client.command("TRUNCATE TABLE t")
    client.insert("t", rows, column_names=["a", "s"])
    assert client.query("SELECT count() FROM t").result_rows == [(200_000,)]


def test_a_setting_in_the_text_of_an_insert_counts(client: Any, shared_store: Config) -> None:
    client.command(
        "CREATE TABLE t (a Int32) ENGINE = MergeTree ORDER BY a"
        " SETTINGS non_replicated_deduplication_window = 10"
    )
    text = "INSERT INTO t SETTINGS insert_deduplication_token = 'x' FORMAT CSV"
    for body in (b"1\n", b"2\n"):
        _ask(shared_store, query=text, database=client.database, body=body)
    assert client.query("SELECT a FROM t").result_rows == [(1,)]


def test_any_http_client_is_answered(shared_store: Config, client: Any) -> None:
    assert _ask(shared_store, query="SELECT 1, 2") == (200, "", b"1\t2\n")
    assert _ask(shared_store, body=b"SELECT 1 AS x FORMAT JSONEachRow")[2] == b'{"x":1}\n'
    assert _ask(shared_store, query="SELECT 1 AS x", default_format="CSVWithNames")[2] == (
        b'"x"\n1\n'
    )
    with urllib.request.urlopen(_url(shared_store, "/ping")) as answer:
        assert answer.read() == b"Ok.\n"


@pytest.mark.parametrize(
    ("arguments", "status", "code", "words"),
    [
        ({"query": "SELECT FROM WHERE"}, 400, "62", b"Syntax error"),
        ({"query": "SELECT * FROM nowhere"}, 404, "60", b"nowhere"),
        ({"query": "SELECT 1", "database": "absent"}, 404, "81", b"absent"),
        ({"query": "SELECT throwIf(1)"}, 500, "395", b"throwIf"),
        ({"query": "SELECT 1", "wieght": "1"}, 404, "115", b"wieght"),
        ({"body": b"zz", "encoding": "zstd"}, 400, "27", b"the body is not zstd"),
        ({"body": b"zz", "encoding": "snappy"}, 400, "27", b"known: gzip, deflate, lz4, zstd"),
        ({"query": "SELECT 1", "body": b"\xff\xfe"}, 400, "27", b"decode"),
    ],
)
def test_errors_have_clickhouse_s_code_and_status(
    shared_store: Config, client: Any, arguments: dict[str, Any], status: int, code: str,
    words: bytes,
) -> None:  # fmt: skip
    found = _ask(shared_store, **arguments)
    assert found[:2] == (status, code)
    assert words in found[2]


def test_a_query_has_bounds(client: Any) -> None:
    with pytest.raises(DatabaseError, match=r"(?i)memory limit"):
        client.command("SELECT length(groupArray(number)) FROM numbers(1000000000)")
    assert client.query("SELECT 1").result_rows == [(1,)]


def test_a_folder_has_one_owner(shared_store: Config, client: Any) -> None:
    file = shared_store.run.dir / "config.toml"
    second = subprocess.run(
        command(spec_of("store"), file, ("store.port=0",)),
        env=environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert second.returncode == 2
    assert "belongs to another store service (pid" in second.stderr
    assert client.query("SELECT 1").result_rows == [(1,)]


def test_a_database_that_is_not_there_is_named_at_once(shared_store: Config, client: Any) -> None:
    with pytest.raises(InfraError, match=r"refuses.*absent.*store\.database"):
        store_client(shared_store, database="absent", budget_s=60)


def _url(config: Config, path: str) -> str:
    return f"http://{config.store.host}:{config.store.port}{path}"


def _ask(
    config: Config, *, body: bytes = b"", encoding: str = "", **arguments: str
) -> tuple[int, str, bytes]:
    """Status, exception code and body of one POST."""
    request = urllib.request.Request(
        _url(config, f"/?{urllib.parse.urlencode(arguments)}"),
        data=body,
        headers={"Content-Encoding": encoding} if encoding else {},
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, "", answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["X-ClickHouse-Exception-Code"], error.read()
