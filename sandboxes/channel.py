"""The executor's end of a session: requests to the guest, bounded replies back.

One request at a time (a lock); the reply is read under a deadline that lies outside the sandbox.
Bytes from the guest are data: lengths are checked, nothing is unpickled. Closing the channel ends
the guest.
"""

from __future__ import annotations

import asyncio
import contextlib
import marshal
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

from rollstream.errors import SandboxLostError

# The guest enforces the command's limit; this much later the executor stops believing in it.
_GRACE_S = 2.0
_MAX_FRAME_BYTES = 128 << 20
_CLOSE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """The end of a command."""

    code: int
    reason: str
    wall_s: float
    cpu_s: float
    max_rss_bytes: int
    dropped_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Bytes of "stdout" or "stderr", or a "file" (name, NUL, content)."""

    stream: str
    data: bytes


class GuestProcess(Protocol):
    """The process that a channel ends with: ``subprocess.Popen`` is one."""

    def poll(self) -> int | None:
        """None while it runs."""

    def kill(self) -> None:
        """SIGKILL; ``ProcessLookupError`` when it is gone."""


class RefusedError(Exception):
    """The guest refused a request: a bad path, no space."""


_STREAMS = {b"o": "stdout", b"e": "stderr", b"f": "file"}


class Channel:
    """A live session. Owns the socket and the process that the backend started."""

    def __init__(self, end: socket.socket, process: GuestProcess | None = None) -> None:
        self._end = end
        self._process = process
        self._lock = asyncio.Lock()
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self.lost = False

    async def open(self, *, timeout_s: float) -> None:
        """Connect and wait for the first answer: only then is the session ready."""
        if self._reader is None:
            self._reader, self._writer = await asyncio.open_unix_connection(sock=self._end)
        async for _ in self.request({"op": "ping"}, timeout_s=timeout_s):
            pass

    async def adopt(self, *, timeout_s: float) -> int:
        """Wait until a fork server says which process (host pid) answers on this channel.

        Raises:
            SandboxLostError: it could not make one; the message says why.
        """
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._end)
        try:
            async with asyncio.timeout(timeout_s):
                kind, payload = await self._receive()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, ValueError) as error:
            raise SandboxLostError(f"no session came: {error!r}") from error
        if kind != b"p":
            raise SandboxLostError(payload.decode("utf-8", "replace"))
        return int(payload)

    def owns(self, process: GuestProcess) -> None:
        """The process whose end is this session's end."""
        self._process = process

    async def request(
        self, request: dict[str, Any], *, timeout_s: float
    ) -> AsyncIterator[Output | Exit]:
        """Send a request and yield what comes back, an ``Exit`` last.

        Raises:
            SandboxLostError: the guest died, or did not answer within ``timeout_s`` and a grace.
            RefusedError: the guest refused.
        """
        async with self._lock:
            if self.lost:
                raise SandboxLostError("the session is gone")
            try:
                async with asyncio.timeout(timeout_s + _GRACE_S):
                    await self._send(request)
                    while True:
                        kind, payload = await self._receive()
                        if kind == b"r":
                            raise RefusedError(payload.decode("utf-8", "replace"))
                        if kind == b"x":
                            yield _exit(payload)
                            return
                        yield Output(stream=_STREAMS[kind], data=payload)
            except (TimeoutError, OSError, asyncio.IncompleteReadError, ValueError, KeyError) as e:
                self.lost = True
                raise SandboxLostError(f"the session died: {e!r}") from e
            except RefusedError:
                raise
            except BaseException:
                # The reader went away in the middle of a reply (cancelled, or closed early): what
                # follows would be taken for the answer to the next request.
                self.lost = True
                raise

    async def close(self) -> None:
        """End the guest and everything in it; returns when its processes are gone."""
        self.lost = True
        if self._writer is not None:
            self._writer.close()
        else:
            self._end.close()
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await asyncio.wait_for(_gone(self._process), _CLOSE_S)

    @property
    def alive(self) -> bool:
        return not self.lost and self._process is not None and self._process.poll() is None

    async def _send(self, request: dict[str, Any]) -> None:
        assert self._writer is not None, "open() first"
        body = marshal.dumps(request)
        self._writer.write(len(body).to_bytes(4, "little") + body)
        await self._writer.drain()

    async def _receive(self) -> tuple[bytes, bytes]:
        assert self._reader is not None
        head = await self._reader.readexactly(5)
        length = int.from_bytes(head[1:], "little")
        if length > _MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {length} bytes")
        return head[:1], await self._reader.readexactly(length) if length else b""


def _exit(payload: bytes) -> Exit:
    code, reason, wall, cpu, rss, dropped = payload.decode("ascii").split(" ")
    return Exit(
        code=int(code),
        reason=reason,
        wall_s=float(wall),
        cpu_s=float(cpu),
        max_rss_bytes=int(rss) * 1024,
        dropped_bytes=int(dropped),
    )


async def _gone(process: GuestProcess) -> None:
    delay = 0.001
    while process.poll() is None:
        await asyncio.sleep(delay)
        delay = min(0.05, delay * 2)
