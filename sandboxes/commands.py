"""Commands of a session: numbered frames that can be read again from any number.

A command is a task that moves what the guest says into frames, whether somebody listens or not; the
caps on output bound what it keeps. While it runs its control group is looked at: where one process
was killed for memory all of the command is, so that what is left of it does not fight for the rest.

| task | waits for | unblocked by |
|---|---|---|
| ``command`` | the guest | its end frame; its deadline, which the channel keeps |
| ``frames`` | the next frame | ``command`` |
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from rollstream.errors import SandboxLostError
from sandboxes.channel import Channel, Exit, Output, RefusedError

_HEARTBEAT_S = 5.0
_LOOK_S = 0.25
_KILL_ALL = {"op": "signal", "number": 9, "all": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The first frame."""

    process_id: str
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The command runs, and has nothing to say."""

    elapsed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The last frame: ``limits_hit`` names limits that the command ran into."""

    exit: Exit
    limits_hit: tuple[str, ...]


Frame: TypeAlias = Started | Heartbeat | Output | Ended


class Command:
    """One command. ``frames`` may be called at any time, by any number of readers."""

    def __init__(self, channel: Channel, *, generation: int, request_id: str = "") -> None:
        self.process_id = uuid.uuid4().hex
        self.request_id = request_id
        self.running = False
        self.done = False
        self._channel = channel
        self._generation = generation
        self._began = time.monotonic()
        self._frames: list[Frame] = []
        self._error: Exception | None = None
        self._next: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._hits = (0, 0)

    def start(
        self, request: dict[str, Any], *, timeout_s: float, lost: Callable[[], Awaitable[str]]
    ) -> asyncio.Task[None]:
        """Begin; ``lost`` is told when the session dies with it, and says why it did."""
        run = self._run(request, timeout_s, lost)
        self._task = asyncio.create_task(run, name="command")
        return self._task

    async def _run(
        self, request: dict[str, Any], timeout_s: float, lost: Callable[[], Awaitable[str]]
    ) -> None:
        watch = asyncio.create_task(self._watch(), name="command-watch")
        try:
            parts = self._channel.request(request, timeout_s=timeout_s, on_turn=self._on_turn)
            async with contextlib.aclosing(parts):
                async for part in parts:
                    self._add(self._ended(part) if isinstance(part, Exit) else part)
        except SandboxLostError as error:
            cause = await lost()
            self._error = SandboxLostError(f"the session died ({cause})")
            self._error.__cause__ = error
        except RefusedError as error:
            self._error = error
        except asyncio.CancelledError:
            self._error = RefusedError("the command was ended")
            raise
        finally:
            watch.cancel()
            self.running = False
            self.done = True
            self._wake()

    def _on_turn(self) -> None:
        self.running = True
        self._hits = self._count()
        self._add(Started(process_id=self.process_id, generation=self._generation))

    async def frames(self, start: int = 0) -> AsyncIterator[tuple[int, Frame]]:
        """(number, frame) from ``start`` to the end.

        Raises:
            SandboxLostError: the session died meanwhile, or was reset.
            RefusedError: the guest did not take the command.
        """
        number = start
        while True:
            while number < len(self._frames):
                yield number, self._frames[number]
                number += 1
            if self.done:
                if self._error is not None:
                    raise self._error
                return
            if self._next is None:
                self._next = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._next)

    async def write_stdin(self, data: bytes, *, eof: bool) -> None:
        if self.running:
            await self._channel.poke({"op": "stdin", "data": data, "eof": eof})

    async def signal(self, number: int) -> None:
        """To the command's process group."""
        if self.running:
            await self._channel.poke({"op": "signal", "number": number, "all": False})

    async def kill(self) -> None:
        """The command and all that it started."""
        if self.running:
            await self._channel.poke(_KILL_ALL)
        elif self._task is not None:
            # It still waits for its turn: a signal would hit the one that has it.
            self._task.cancel()

    async def _watch(self) -> None:
        beat = time.monotonic() + _HEARTBEAT_S
        seen = len(self._frames)
        while True:
            await asyncio.sleep(_LOOK_S)
            if self.running and self._count()[0] > self._hits[0]:
                await self.kill()
            if len(self._frames) != seen:
                seen, beat = len(self._frames), time.monotonic() + _HEARTBEAT_S
            elif time.monotonic() >= beat:
                self._add(Heartbeat(elapsed_s=time.monotonic() - self._began))

    def _ended(self, end: Exit) -> Ended:
        """The guest's account of the end, with what only the control group knows."""
        killed, refused = (
            now > before for now, before in zip(self._count(), self._hits, strict=True)
        )
        reason = end.reason
        if killed and end.code == -9 and reason == "signalled":
            reason = "oom"
        elif refused and end.code and reason == "exited":
            reason = "pids"
        hit = [name for name, was in (("memory", killed), ("pids", refused)) if was]
        return Ended(exit=replace(end, reason=reason), limits_hit=tuple(hit))

    def _count(self) -> tuple[int, int]:
        group = self._channel.group
        return (group.memory_killed(), group.processes_refused()) if group else (0, 0)

    def _add(self, frame: Frame) -> None:
        self._frames.append(frame)
        self._wake()

    def _wake(self) -> None:
        if self._next is not None:
            self._next.set_result(None)
            self._next = None
