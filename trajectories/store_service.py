"""chDB behind ClickHouse's HTTP protocol, so that every process uses the ordinary client.

chDB allows one process per folder; this one owns it. A request runs in one of a few threads, each
with a chDB connection of its own; the event loop only moves bytes. What is understood: queries with
settings and parameters (also as multipart forms), inserts in any format, compressed bodies, errors
with ClickHouse's code. What is not: sessions, users, roles: it listens on loopback.
"""

from __future__ import annotations

import asyncio
import gzip
import re
import threading
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog
from aiohttp import web

from rollstream.errors import ConfigError

log = structlog.get_logger(__name__)

_MAX_REQUEST_BYTES = 1 << 30
_THREADS = 4
# Arguments of the HTTP interface that are not settings of the query.
_TRANSPORT = frozenset(
    [
        "query",
        "database",
        "session_id",
        "session_timeout",
        "session_check",
        "default_format",
        "compress",
        "decompress",
        "enable_http_compression",
        "http_zlib_compression_level",
        "query_id",
        "user",
        "password",
        "client_protocol_version",
        "wait_end_of_query",
        "buffer_size",
        "quota_key",
        "role",
        "send_progress_in_http_headers",
        "http_headers_progress_interval_ms",
        "send_receive_timeout",
        "network_compression_method",
        "http_max_field_value_size",
    ]
)
_INSERT = re.compile(
    r"\s*insert\s+into\s+(?:table\s+)?(?P<table>\S+?)\s*(?P<columns>\([^)]*\))?\s*"
    r"(?:settings.*?)?\s*format\s+(?P<format>\w+)\s*$",
    re.IGNORECASE | re.DOTALL,
)
_INSERT_HEAD = re.compile(rb"\s*insert\s+into.*?format\s+\w+\s*?\n", re.IGNORECASE | re.DOTALL)
_CODE = re.compile(r"Code:\s*(\d+)")
_NOT_FOUND_CODES = {"60", "81"}


@dataclass(slots=True, kw_only=True)
class Request:
    """One request, transport stripped off."""

    query: str
    body: bytes
    database: str
    settings: dict[str, str] = field(default_factory=dict)
    parameters: dict[str, str] = field(default_factory=dict)


class ChdbEngine:
    """The one owner of a chDB folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._local = threading.local()
        self._threads = ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="chdb")
        self.queries_total = 0
        self.inserts_total = 0

    async def open(self) -> None:
        """Open the folder. ``ConfigError`` when another process owns it or it is damaged."""
        self._path.mkdir(parents=True, exist_ok=True)
        try:
            await self._in_thread(self._root)
        except Exception as error:
            raise ConfigError(
                f"the store's folder {self._path} cannot be opened: {error}",
                hint="is another store service running on it?",
            ) from error

    async def run(self, request: Request) -> bytes:
        """The answer of one request; raises what chDB raises."""
        answer: bytes = await self._in_thread(lambda: self._run(request))
        return answer

    def close(self) -> None:
        self._threads.shutdown(wait=True)

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _root(self) -> None:
        # Held for the life of the process: it is what owns the folder.
        self._owner = self._connect()

    def _connect(self) -> Any:
        import clickhouse_connect

        settings = {"max_threads": 1, "max_insert_threads": 1}
        return clickhouse_connect.get_client(
            interface="chdb", path=str(self._path), settings=settings
        )

    def _client(self, database: str) -> Any:
        if not hasattr(self._local, "client"):
            self._local.client = self._connect()
        self._local.client.database = database or "default"
        return self._local.client

    def _run(self, request: Request) -> bytes:
        client = self._client(request.database)
        query, body = request.query, request.body
        if not query and (head := _INSERT_HEAD.match(body)):
            query, body = head[0].decode().strip(), body[head.end() :]
        if query[:20].lstrip()[:6].lower() == "insert" and (found := _INSERT.match(query)) and body:
            self.inserts_total += 1
            return self._insert(client, found, body, request.settings)
        self.queries_total += 1
        text = f"{query}\n{body.decode()}" if query and body else query or body.decode()
        answer: bytes = client.raw_query(
            text, settings=request.settings, parameters=request.parameters or None
        )
        return answer

    def _insert(
        self, client: Any, found: re.Match[str], body: bytes, settings: Mapping[str, str]
    ) -> bytes:
        columns = found["columns"]
        names = [c.strip().strip("`") for c in columns[1:-1].split(",")] if columns else None
        client.raw_insert(
            found["table"].replace("`", ""),
            column_names=names,
            insert_block=body,
            settings=dict(settings),
            fmt=found["format"],
        )
        return b""


def make_app(engine: ChdbEngine) -> web.Application:
    """The HTTP interface over an engine."""

    async def ping(_: web.Request) -> web.Response:
        return web.Response(text="Ok.\n")

    async def handle(http: web.Request) -> web.Response:
        try:
            request = await _parse(http)
        except ValueError as error:
            return _error(f"Code: 27. DB::Exception: {error}", status=400)
        try:
            answer = await engine.run(request)
        except Exception as error:  # noqa: BLE001 - chDB's error is the answer
            return _error(str(error))
        headers = {
            "X-ClickHouse-Summary": "{}",
            "X-ClickHouse-Timezone": "UTC",
            "Content-Type": "application/octet-stream",
        }
        return web.Response(body=answer, headers=headers)

    app = web.Application(client_max_size=_MAX_REQUEST_BYTES)
    app.add_routes([web.get("/ping", ping), web.get("/", handle), web.post("/", handle)])
    return app


async def _parse(http: web.Request) -> Request:
    arguments = dict(http.query)
    request = Request(
        query=arguments.get("query", ""), body=b"", database=arguments.get("database", "")
    )
    for name, value in arguments.items():
        if name.startswith("param_"):
            request.parameters[name[6:]] = value
        elif name not in _TRANSPORT:
            request.settings[name] = value
    if http.content_type == "multipart/form-data":
        for name, part in (await http.post()).items():
            text = part.file.read().decode() if isinstance(part, web.FileField) else str(part)
            if name == "query":
                request.query = text
            elif name.startswith("param_"):
                request.parameters[name[6:]] = text
    else:
        request.body = _inflate(await http.read(), http.headers.get("Content-Encoding", ""))
    return request


def _inflate(body: bytes, encoding: str) -> bytes:
    if encoding in ("", "identity"):
        return body
    if encoding == "gzip":
        # aiohttp has inflated it already when the header was understood.
        return gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body
    if encoding == "deflate":
        try:
            return zlib.decompress(body)
        except zlib.error:
            return body
    if encoding == "lz4":
        import lz4.frame

        return bytes(lz4.frame.decompress(body))
    if encoding == "zstd":
        from backports import zstd

        return bytes(zstd.decompress(body)) if body[:4] == b"\x28\xb5\x2f\xfd" else body
    raise ValueError(f"unknown Content-Encoding {encoding!r}")


def _error(text: str, *, status: int = 500) -> web.Response:
    found = _CODE.search(text)
    code = found[1] if found else "1002"
    status = 404 if code in _NOT_FOUND_CODES else status
    return web.Response(text=text, status=status, headers={"X-ClickHouse-Exception-Code": code})
