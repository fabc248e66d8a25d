"""Writes chunks of the log into the tables; a chunk counts once, however often it is written.

Order: each table's rows under the chunk's token, then the chunk's line in ``ingested``, the commit
log. A process may die between any two of these inserts: the next life starts at the last line, and
writes again what stands behind it. Same chunk: the tokens make it a no-op. Cut differently: the
tables' keys do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message
from opentelemetry import trace

from rollstream.bus import Record
from rollstream.errors import ContractError, InfraError
from rollstream.telemetry import extract
from trajectories.chunks import Chunk
from trajectories.rows import COLUMNS, Origin, Row, rows_of

_SETTINGS = {"async_insert": 0, "deduplicate_blocks_in_dependent_materialized_views": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """A chunk as rows by table, in the order in which the tables are to be written; and what of it
    is broken.
    """

    tables: Mapping[str, list[Row]]
    broken: list[tuple[Record, ContractError]]

    @property
    def rows(self) -> int:
        return sum(len(rows) for rows in self.tables.values())


class ChunkWriter:
    """Writes into one database what comes from one log. Blocks: to be called in a thread."""

    def __init__(self, client: Any, *, log: str) -> None:
        self._client = client
        self._types: dict[str, Any] = {}
        self.log = log

    def stored(self) -> dict[tuple[str, int], int]:
        """The last stored offset by (topic, partition)."""
        query = (
            "SELECT _topic, _partition, max(last) FROM ingested WHERE _log = {log:String}"
            " GROUP BY _topic, _partition"
        )
        result = self._client.query(query, parameters={"log": self.log})
        return {(topic, partition): last for topic, partition, last in result.result_rows}

    def convert(self, chunk: Chunk, decode: Callable[[Record], Message]) -> Converted:
        """The rows of a chunk. ``decode`` may raise ``ContractError``: that record is broken."""
        tables: dict[str, list[Row]] = defaultdict(list)
        broken = []
        for record in chunk.records:
            try:
                rows = rows_of(decode(record), _origin(record, self.log))
            except ContractError as error:
                broken.append((record, error))
                continue
            except (InfraError, OSError):
                raise
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the record's
                # It would end this sink, and the next one, and so on.
                broken.append((record, _bug(record, error)))
                continue
            for table, row in rows:
                tables[table].append(row)
        return Converted(tables=tables, broken=broken)

    def write(self, chunk: Chunk, converted: Converted) -> None:
        """Insert a chunk; it counts from the moment its line in ``ingested`` is there."""
        token = chunk.token(self.log)
        for table, rows in converted.tables.items():
            self._put(table, rows, f"{token}:{table}")
        line = (
            self.log, chunk.topic, chunk.partition, chunk.first, chunk.last,
            len(chunk.records), len(converted.broken),
        )  # fmt: skip
        self._put("ingested", [line], token)

    def _put(self, table: str, rows: list[Row], token: str) -> None:
        if table not in self._types:
            # Asked for once; the client would ask before each insert.
            context = self._client.create_insert_context(table, column_names=COLUMNS[table])
            self._types[table] = context.column_types
        summary = self._client.insert(
            table,
            rows,
            column_names=COLUMNS[table],
            column_types=self._types[table],
            settings={**_SETTINGS, "insert_deduplication_token": token},
        )
        # Views that the table feeds count as well; what it knows by its token counts in full.
        if summary.written_rows < len(rows):
            raise InfraError(
                f"the store took {summary.written_rows} of {len(rows)} rows for {table} ({token})",
                hint="is a proxy between them that cuts what it forwards?",
            )


def _bug(record: Record, error: Exception) -> ContractError:
    where = f"{record.topic}/{record.partition}/{record.offset}"
    return ContractError(
        f"no rows can be made of {where}: {error!r}", hint="a bug: please report it"
    )


def _origin(record: Record, log_id: str) -> Origin:
    span = trace.get_current_span(extract(record.headers)).get_span_context()
    return Origin(
        log=log_id,
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        trace_id=f"{span.trace_id:032x}" if span.is_valid else "",
    )
