"""The executor's end of a session: requests to the guest, bounded replies back.

One request at a time (a lock); the reply is read under a deadline that lies outside the sandbox.
While a command runs, ``poke`` sends it what has no reply: input and signals.
Bytes from the guest are data: lengths are checked, nothing is unpickled. Closing the channel ends
the guest.
"""

from __future__ import annotations

import asyncio
import contextlib
import marshal
import socket
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from rollstream.errors import SandboxLostError
from sandboxes.cgroups import Group
from sandboxes.layers import Layer

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
    """Bytes of "stdout" or "stderr", a "file" (name, NUL, content) or a piece of one, an "entry" (a
    line about a file), or "truncated" ("o" or "e", and how many bytes were left out).
    """

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


_STREAMS = {b"o": "stdout", b"e": "stderr", b"f": "file", b"l": "entry", b"t": "truncated"}
# Input that waits for a command that does not read it.
_MAX_WAITING_BYTES = 4 << 20


class Channel:
    """A live session. Owns the socket and the process that the backend started."""

    def __init__(self, end: socket.socket, process: GuestProcess | None = None) -> None:
        self._end = end
        self._process = process
        self._lock = asyncio.Lock()
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self.lost = False
        # What the backend made for this session: its writable layer, its control group.
        self.disk: Layer | None = None
        self.group: Group | None = None

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
        self._end.setblocking(False)
        try:
            async with asyncio.timeout(timeout_s):
                while (frame := await self._first_frame())[0] == b"d":
                    pass
        except (TimeoutError, OSError, ValueError) as error:
            raise SandboxLostError(f"no session came: {error!r}") from error
        kind, payload = frame
        if kind != b"p":
            raise SandboxLostError(payload.decode("utf-8", "replace"))
        return int(payload)

    async def _first_frame(self) -> tuple[bytes, bytes]:
        """A frame before the streams are opened; ``d`` brings the descriptor of the layer."""
        await _readable(self._end)
        head, fds, _, _ = socket.recv_fds(self._end, 5, 1)
        if fds:
            self.disk = Layer(fds[0])
        if len(head) < 5:
            raise ValueError("it ended at once")
        payload = b""
        while len(payload) < int.from_bytes(head[1:], "little"):
            await _readable(self._end)
            payload += self._end.recv(int.from_bytes(head[1:], "little") - len(payload))
        return head[:1], payload

    def owns(self, process: GuestProcess) -> None:
        """The process whose end is this session's end."""
        self._process = process

    async def request(
        self,
        request: dict[str, Any],
        *,
        timeout_s: float,
        on_turn: Callable[[], None] | None = None,
    ) -> AsyncGenerator[Output | Exit, None]:
        """Send a request and yield what comes back, an ``Exit`` last. ``on_turn``: called when no
        other request is before this one any more.

        Raises:
            SandboxLostError: the guest died, or did not answer within ``timeout_s`` and a grace.
            RefusedError: the guest refused.
        """
        async with self._lock:
            if self.lost:
                raise SandboxLostError("the session is gone")
            try:
                async with asyncio.timeout(timeout_s + _GRACE_S):
                    if on_turn is not None:
                        on_turn()
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

    async def poke(self, message: dict[str, Any]) -> None:
        """Tell the command that runs; there is no answer, and none when it has ended.

        Raises:
            RefusedError: it has not read what it was sent before.
        """
        if self.lost or self._writer is None:
            return
        if self._writer.transport.get_write_buffer_size() > _MAX_WAITING_BYTES:
            raise RefusedError("the command does not read its input")
        body = marshal.dumps(message)
        self._writer.write(len(body).to_bytes(4, "little") + body)

    async def close(self) -> None:
        """End the guest and everything in it; returns when its processes are gone."""
        self.lost = True
        try:
            await self._end_guest()
        finally:
            if self.group is not None:
                await self.group.remove()
            # The layer is not closed here: a snapshot may stand on it. It goes with its last owner.
            self.disk = None

    async def _end_guest(self) -> None:
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


async def _readable(end: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(end.fileno(), _settle, ready)
    try:
        await ready
    finally:
        loop.remove_reader(end.fileno())


def _settle(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


async def _gone(process: GuestProcess) -> None:
    delay = 0.001
    while process.poll() is None:
        await asyncio.sleep(delay)
        delay = min(0.05, delay * 2)
