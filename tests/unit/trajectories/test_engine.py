"""What of a request is understood before the engine sees it."""

from __future__ import annotations

import gzip
import zlib

import pytest

from trajectories.store_engine import _FORMAT, _INSERT, _SETTING, inflate


@pytest.mark.parametrize(
    ("text", "table", "columns", "settings", "form"),
    [
        ("INSERT INTO t FORMAT Native", "t", None, None, "Native"),
        (" insert into `d`.`t` (`a`, b)\nformat CSV ", "`d`.`t`", "(`a`, b)", None, "CSV"),
        ("INSERT INTO TABLE t (a) SETTINGS x = 1 FORMAT Native", "t", "(a)", "x = 1", "Native"),
    ],
)
def test_inserts_with_data_are_taken_apart(
    text: str, table: str, columns: str | None, settings: str | None, form: str
) -> None:
    found = _INSERT.match(text)
    assert found is not None
    parts = found["settings"] and found["settings"].strip()
    assert (found["table"], found["columns"], parts, found["format"]) == (
        table, columns, settings, form,
    )  # fmt: skip


@pytest.mark.parametrize(
    "text",
    ["INSERT INTO t VALUES (1)", "INSERT INTO t SELECT 1", "SELECT 'insert into t format x y'"],
)
def test_other_statements_are_left_whole(text: str) -> None:
    assert _INSERT.match(text) is None


def test_settings_of_an_insert_keep_their_values() -> None:
    text = "async_insert=0, insert_deduplication_token = 'a:b, c', x = 2"
    assert _SETTING.findall(text) == [
        ("async_insert", "0"), ("insert_deduplication_token", "'a:b, c'"), ("x", "2"),
    ]  # fmt: skip


def test_a_format_in_the_query_wins() -> None:
    assert _FORMAT.search("SELECT 1 FORMAT JSON;")
    assert not _FORMAT.search("SELECT format FROM t")


def test_bodies_are_inflated_or_refused() -> None:
    assert inflate(b"x", "") == inflate(gzip.compress(b"x"), "gzip") == b"x"
    assert inflate(zlib.compress(b"x"), "deflate") == b"x"
    with pytest.raises(ValueError, match="the body is not gzip"):
        inflate(b"x", "gzip")
    with pytest.raises(ValueError, match="unknown Content-Encoding 'br'; known: gzip"):
        inflate(b"x", "br")
