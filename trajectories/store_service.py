"""chDB behind ClickHouse's HTTP protocol, so that every process uses the ordinary client.

What is understood: queries with settings and parameters (also as multipart forms), inserts in any
format, compressed bodies, errors with ClickHouse's code. What is not: sessions, users, roles: it
listens on loopback.

| waits for | bound | unblocked by |
|---|---|---|
| a slot | 16 requests at once; their bodies are read only then | a request that ends |
| the engine | its threads; ``store.request_timeout_s`` a query | chDB |
"""

from __future__ import annotations

import asyncio
import json
import re

import structlog
from aiohttp import web

from trajectories.store_engine import ChdbEngine, Request

log = structlog.get_logger(__name__)

# A chunk of the sink is at most store.chunk_bytes and one record more.
_MAX_REQUEST_BYTES = 256 << 20
_MAX_REQUESTS = 16
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
_CODE = re.compile(r"Code:\s*(\d+)")
_UNREADABLE = "27"
# As ClickHouse answers: what was asked cannot be read (400), or is not there (404); else 500.
_STATUS = {
    **dict.fromkeys(["6", "26", "27", "36", "38", "41", "53", "62", "117", "167"], 400),
    **dict.fromkeys(["16", "46", "47", "50", "56", "60", "73", "81", "115"], 404),
    "48": 501,
}


def make_app(engine: ChdbEngine) -> web.Application:
    """The HTTP interface over an engine. To be run with ``auto_decompress=False``."""
    slots = asyncio.Semaphore(_MAX_REQUESTS)

    async def ping(_: web.Request) -> web.Response:
        return web.Response(text="Ok.\n")

    async def handle(http: web.Request) -> web.Response:
        async with slots:
            try:
                answer = await engine.run(await _parse(http))
            except web.HTTPException:
                raise
            except ValueError as error:
                return _error(f"Code: {_UNREADABLE}. DB::Exception: {error}")
            except Exception as error:  # noqa: BLE001 - chDB's error is the answer
                return _error(str(error))
        headers = {
            "X-ClickHouse-Summary": json.dumps(answer.summary),
            "X-ClickHouse-Timezone": "UTC",
            "Content-Type": "application/octet-stream",
        }
        return web.Response(body=answer.body, headers=headers)

    app = web.Application(client_max_size=_MAX_REQUEST_BYTES)
    app.add_routes([web.get("/ping", ping), web.get("/", handle), web.post("/", handle)])
    return app


async def _parse(http: web.Request) -> Request:
    arguments = dict(http.query)
    request = Request(
        query=arguments.get("query", ""),
        encoding=http.headers.get("Content-Encoding", ""),
        database=arguments.get("database", ""),
        format=arguments.get("default_format", http.headers.get("X-ClickHouse-Format", "")),
    )
    for name, value in arguments.items():
        if name.startswith("param_"):
            request.parameters[name[6:]] = value
        elif name not in _TRANSPORT:
            request.settings[name] = value
    if http.content_type == "multipart/form-data":
        await _read_form(http, request)
    else:
        request.body = await http.read()
    return request


async def _read_form(http: web.Request, request: Request) -> None:
    for name, part in (await http.post()).items():
        text = part.file.read().decode() if isinstance(part, web.FileField) else str(part)
        if name == "query":
            request.query = text
        elif name.startswith("param_"):
            request.parameters[name[6:]] = text
        elif name not in _TRANSPORT:
            request.settings[name] = text


def _error(text: str) -> web.Response:
    found = _CODE.search(text)
    code = found[1] if found else "1002"
    headers = {"X-ClickHouse-Exception-Code": code}
    return web.Response(text=text, status=_STATUS.get(code, 500), headers=headers)
