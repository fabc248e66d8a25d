"""ClickHouse as far as the sink and the books use it: inserts under deduplication tokens, and their queries.

What it keeps of ClickHouse: a block under a token that the table has seen is not inserted again; reading with FINAL
gives the last row of each key, where the keys are those of the schema. ``test_store.py`` holds it against chDB.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from types import SimpleNamespace
from typing import Any

from clickhouse_connect.driver.exceptions import OperationalError

from tests.simulation.kernel import Loop
from trajectories import accounting
from trajectories.rows import COLUMNS

_SCHEMA = (files("trajectories") / "schema" / "0001_events.sql").read_text("utf-8")
KEYS: dict[str, tuple[str, ...]] = {
    table: tuple(name.strip() for name in key.split(","))
    for table, key in re.findall(
        r"CREATE TABLE IF NOT EXISTS (\w+).*?^ORDER BY \(([^)]*)\)", _SCHEMA, re.S | re.M
    )
}


@dataclass(slots=True)
class Store:
    """What is durable. ``blocks``: by table, the blocks that were inserted, in order."""

    loop: Loop
    blocks: dict[str, list[tuple[str, list[tuple[Any, ...]]]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    tokens: set[tuple[str, str]] = field(default_factory=set)
    # Share of the requests that fail, half of them after they were done.
    failing: float = 0.0

    def rows(self, table: str) -> list[dict[str, Any]]:
        """What FINAL gives."""
        columns = COLUMNS[table]
        found: dict[tuple[Any, ...], dict[str, Any]] = {}
        for _, block in self.blocks[table]:
            for values in block:
                row = dict(zip(columns, values, strict=True))
                found[tuple(row[name] for name in KEYS[table])] = row
        return list(found.values())


class StoreClient:
    """What the sink holds of it; every request may fail, before or after it was done."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def create_insert_context(self, table: str, *, column_names: Sequence[str]) -> Any:
        return SimpleNamespace(column_types=[None] * len(column_names))

    def insert(
        self,
        table: str,
        rows: Sequence[tuple[Any, ...]],
        *,
        column_names: Sequence[str],
        column_types: Sequence[Any],
        settings: Mapping[str, Any],
    ) -> SimpleNamespace:
        store = self._store
        assert tuple(column_names) == COLUMNS[table]
        self._may_fail()
        store.loop.effect()
        token = settings.get("insert_deduplication_token", "")
        if not token or (table, token) not in store.tokens:
            store.blocks[table].append((token, list(rows)))
            if token:
                store.tokens.add((table, token))
        store.loop.effect()
        self._may_fail()
        return SimpleNamespace(written_rows=len(rows))

    def query(self, text: str, *, parameters: Mapping[str, Any]) -> Any:
        self._may_fail()
        return SimpleNamespace(result_rows=answer(self._store, text, parameters))

    def _may_fail(self) -> None:
        if self._store.failing and self._store.loop.rng.random() < self._store.failing / 2:
            raise OperationalError("the store does not answer")


class Reader:
    """For the books, when all is over."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def query(self, text: str, *, parameters: Mapping[str, Any]) -> Any:
        return SimpleNamespace(result_rows=answer(self._store, text, parameters))


def answer(store: Store, text: str, parameters: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """The rows of one of the queries that are asked."""
    for known, function in _ANSWERS.items():
        if text == known:
            return function(store, str(parameters["run"]))
    if "FROM ingested WHERE _log" in text:
        return _stored(store, str(parameters["log"]))
    raise NotImplementedError(f"the simulated store does not know this query: {text}")


def _stored(store: Store, log: str) -> list[tuple[Any, ...]]:
    last: dict[tuple[str, int], int] = {}
    for row in store.rows("ingested"):
        if row["_log"] == log:
            at = (row["_topic"], row["_partition"])
            last[at] = max(last.get(at, -1), row["last"])
    return [(*at, offset) for at, offset in last.items()]


def _of_run(store: Store, table: str, run: str) -> list[dict[str, Any]]:
    return [row for row in store.rows(table) if row["run_id"] == run]


def _tasks(store: Store, run: str) -> list[tuple[Any, ...]]:
    rows = _of_run(store, "tasks", run)
    return [(r["task_id"], r["group_id"], r["group_size"]) for r in rows if r["purpose"] == "train"]


def _closed(store: Store, run: str) -> list[tuple[Any, ...]]:
    found: dict[str, str] = {}
    for row in _of_run(store, "group_samples", run):
        rollout, reason = row["rollout_id"], row["drop_reason"]
        found[rollout] = min(found.get(rollout, reason), reason)
    return list(found.items())


def _trained(store: Store, run: str) -> list[tuple[Any, ...]]:
    found: dict[str, set[str]] = defaultdict(set)
    for row in _of_run(store, "training_samples", run):
        if not row["drop_reason"]:
            found[row["rollout_id"]].add(row["event_id"])
    return [(rollout, sorted(events)) for rollout, events in found.items()]


def _refused(store: Store, run: str) -> list[tuple[Any, ...]]:
    found: dict[str, str] = {}
    for row in _of_run(store, "training_samples", run):
        if row["drop_reason"]:
            rollout = row["rollout_id"]
            found[rollout] = max(found.get(rollout, ""), row["drop_reason"])
    return list(found.items())


def _dead(store: Store, run: str) -> list[tuple[Any, ...]]:
    rows = _of_run(store, "dead_letters", run)
    return [(r["task_id"], r["rollout_id"], r["samples"]) for r in rows if r["samples"] > 0]


def _unreadable(store: Store, run: str) -> list[tuple[Any, ...]]:
    rows = _of_run(store, "dead_letters", run)
    found = {
        _text(r["key"]) for r in rows if r["service"] == "trainer" and r["origin_topic"] == "replay"
    }
    return [(key,) for key in sorted(found)]


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _gaps(store: Store, run: str) -> list[tuple[Any, ...]]:
    ranges: dict[tuple[str, int, str], list[tuple[int, int]]] = defaultdict(list)
    for row in store.rows("ingested"):
        ranges[row["_topic"], row["_partition"], row["_log"]].append((row["first"], row["last"]))
    found = []
    for (topic, partition, _), spans in ranges.items():
        previous = None
        for first, last in sorted(spans):
            compacted = topic in ("policy.versions", "curriculum")
            if previous is not None and first > previous + 1 and not compacted:
                found.append((topic, partition, first, previous))
            previous = last if previous is None else max(previous, last)
    return found


_ANSWERS = {
    accounting._TASKS: _tasks,
    accounting._CLOSED: _closed,
    accounting._TRAINED: _trained,
    accounting._REFUSED: _refused,
    accounting._DEAD: _dead,
    accounting._UNREADABLE: _unreadable,
    accounting._GAPS: _gaps,
}
