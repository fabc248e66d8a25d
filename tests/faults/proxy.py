"""A TCP proxy between two parts, so that a campaign can cut or stall what is between them."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Self

_CHUNK = 1 << 16


class Proxy:
    """Forwards ``port`` (of this machine, chosen by the system) to ``host:port`` of the target."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._flows = asyncio.Event()
        self._flows.set()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0

    async def __aenter__(self) -> Self:
        await self._listen()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hang_up()

    async def cut(self, seconds: float) -> None:
        """Drop every connection and refuse new ones for ``seconds``."""
        self._hang_up()
        await asyncio.sleep(seconds)
        await self._listen()

    async def stall(self, seconds: float) -> None:
        """Accept connections and forward nothing for ``seconds``; what waited then goes on."""
        self._flows.clear()
        await asyncio.sleep(seconds)
        self._flows.set()

    async def _listen(self) -> None:
        # The same port again after a cut.
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def _hang_up(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            await self._flows.wait()
            with contextlib.suppress(OSError):
                target_reader, target_writer = await asyncio.open_connection(*self._target)
                self._writers.add(target_writer)
                try:
                    await asyncio.gather(
                        self._pump(reader, target_writer), self._pump(target_reader, writer)
                    )
                finally:
                    self._writers.discard(target_writer)
                    target_writer.close()
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_CHUNK):
            await self._flows.wait()
            writer.write(data)
            await writer.drain()
        with contextlib.suppress(OSError):
            writer.write_eof()
