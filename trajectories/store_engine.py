"""The one owner of a chDB folder: ClickHouse's engine inside this process.

chDB allows one process per folder; a lock file says which. A request runs in one of a few threads,
each with a chDB connection of its own, so that the event loop never waits for the engine. A query
may take so long, hold so much memory and give so large an answer; beyond that it is an error of
that query and of nothing else.
"""

from __future__ import annotations

import asyncio
import fcntl
import gzip
import os
import re
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollstream.errors import ConfigError

_THREADS = 4
# Of the 6 GiB of a demo a question may take one; its answer, which is held as a whole, less.
_LIMITS = {"max_memory_usage": 1 << 30, "max_result_bytes": 512 << 20}
_ONE_THREAD = {"max_threads": 1, "max_insert_threads": 1}
_INSERT = re.compile(
    r"\s*insert\s+into\s+(?:table\s+)?(?P<table>\S+?)\s*(?P<columns>\([^)]*\))?\s*"
    r"(?:settings\s+(?P<settings>.*?))?\s*format\s+(?P<format>\w+)\s*$",
    re.IGNORECASE | re.DOTALL,
)
_INSERT_HEAD = re.compile(rb"\s*insert\s+into.*?format\s+\w+\s*?\n", re.IGNORECASE | re.DOTALL)
_SETTING = re.compile(r"(\w+)\s*=\s*('(?:[^'\\]|\\.)*'|[^\s,]+)")
_FORMAT = re.compile(r"\bformat\s+\w+\s*;?\s*$", re.IGNORECASE)


@dataclass(slots=True, kw_only=True)
class Request:
    """One request, transport stripped off. ``parameters`` are escaped as HTTP escapes them."""

    query: str = ""
    body: bytes = b""
    # Content-Encoding of the body.
    encoding: str = ""
    database: str = ""
    # Of the answer, when the query names none.
    format: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    parameters: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    body: bytes = b""
    # ClickHouse's counts of an insert.
    summary: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Escaped:
    """A parameter as it came. The client would escape a string once more; what it does not know it
    passes on as its text.
    """

    text: str

    def __str__(self) -> str:
        return self.text


class ChdbEngine:
    """chDB on one folder. ``timeout_s`` bounds a query: its asker has given up by then."""

    def __init__(self, path: Path, *, timeout_s: float) -> None:
        self._path = path
        self._settings = {**_ONE_THREAD, **_LIMITS, "max_execution_time": timeout_s}
        self._local = threading.local()
        self._threads = ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="chdb")
        self._lock = -1
        self.queries_total = 0
        self.inserts_total = 0

    async def open(self) -> None:
        """Open the folder. ``ConfigError`` when another process owns it or it is damaged."""
        try:
            self._path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"the store's folder {self._path} cannot be made: {error}",
                hint="set store.path to a folder that can be written",
            ) from error
        self._lock = _owned(self._path)
        try:
            await self._in_thread(self._root)
        except Exception as error:
            raise ConfigError(
                f"the store's folder {self._path} cannot be opened: {error}",
                hint="was it made by this version of chDB, and is there space?",
            ) from error

    async def run(self, request: Request) -> Answer:
        """The answer of one request.

        Raises:
            ValueError: the body cannot be read as the request says.
            Exception: what chDB raises.
        """
        answer: Answer = await self._in_thread(lambda: self._run(request))
        return answer

    def close(self) -> None:
        self._threads.shutdown(wait=True)
        if self._lock >= 0:
            os.close(self._lock)

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _root(self) -> None:
        # Held for the life of the process: it is what owns the folder.
        self._owner = self._connect()

    def _connect(self) -> Any:
        import clickhouse_connect

        return clickhouse_connect.get_client(
            interface="chdb", path=str(self._path), settings=self._settings
        )

    def _client(self, database: str) -> Any:
        if not hasattr(self._local, "client"):
            self._local.client = self._connect()
        self._local.client.database = database or "default"
        return self._local.client

    def _run(self, request: Request) -> Answer:
        client = self._client(request.database)
        query, body = request.query, inflate(request.body, request.encoding)
        if not query and (head := _INSERT_HEAD.match(body)):
            query, body = head[0].decode().strip(), body[head.end() :]
        if body and (found := _INSERT.match(query)):
            self.inserts_total += 1
            return self._insert(client, found, body, request.settings)
        self.queries_total += 1
        text = f"{query}\n{body.decode()}" if query and body else query or body.decode()
        parameters = {name: _Escaped(value) for name, value in request.parameters.items()}
        answer = client.raw_query(
            text,
            settings=request.settings,
            parameters=parameters or None,
            fmt=None if _FORMAT.search(text) else request.format or None,
        )
        return Answer(body=answer)

    def _insert(
        self, client: Any, found: re.Match[str], body: bytes, settings: dict[str, str]
    ) -> Answer:
        columns = found["columns"]
        names = [c.strip().strip("`") for c in columns[1:-1].split(",")] if columns else None
        written = {n: v.strip("'") for n, v in _SETTING.findall(found["settings"] or "")}
        summary = client.raw_insert(
            found["table"].replace("`", ""),
            column_names=names,
            insert_block=body,
            settings={**settings, **written},
            fmt=found["format"],
        )
        return Answer(summary=summary.summary)


def _owned(path: Path) -> int:
    """Take the folder's lock; the descriptor that holds it. It goes with the process, however that
    ends.
    """
    descriptor = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.read(descriptor, 20).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise ConfigError(
            f"the store's folder {path} belongs to another store service (pid {owner})",
            hint="ask that one, or stop it; one folder has one owner",
        ) from error
    os.truncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor


def inflate(body: bytes, encoding: str) -> bytes:
    """The body behind a Content-Encoding. ``ValueError`` when it is not what the header says."""
    if encoding in ("", "identity"):
        return body
    try:
        return _INFLATE[encoding](body)
    except KeyError:
        raise ValueError(
            f"unknown Content-Encoding {encoding!r}; known: {', '.join(_INFLATE)}"
        ) from None
    except Exception as error:
        raise ValueError(f"the body is not {encoding}: {error}") from error


# A client compresses each block of an insert by itself: what comes is any number of frames.


def _frames(body: bytes, make: Callable[[], Any]) -> bytes:
    """All frames of a body; ``make`` gives the decompressor of one."""
    found = []
    while body:
        one = make()
        found.append(one.decompress(body))
        if not one.eof:
            raise ValueError("it ends in the middle")
        body = one.unused_data or b""
    return b"".join(found)


def _lz4(body: bytes) -> bytes:
    import lz4.frame

    return _frames(body, lz4.frame.LZ4FrameDecompressor)


def _zstd(body: bytes) -> bytes:
    from backports import zstd

    return _frames(body, zstd.ZstdDecompressor)


_INFLATE: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.decompress,
    "deflate": lambda body: _frames(body, zlib.decompressobj),
    "lz4": _lz4,
    "zstd": _zstd,
}
