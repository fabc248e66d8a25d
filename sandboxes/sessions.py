"""The sessions of one executor: made, pooled, leased, set back, ended.

Invariants: a session has exactly one owner from before it is made until it is closed (the pool, the
table, or the call that is making it), so that a cancelled call leaks nothing; a session is never
used twice; live sessions never exceed ``max_sessions``. A snapshot, a restore and a reset end the
guest and make a new one over the layers that are wanted: nothing of the old one is recycled.

| task | waits for | unblocked by |
|---|---|---|
| ``refill-<toolchain>`` | room in the pool | ``acquire`` |
| ``reaper`` | a second | time; ends sessions whose lease ran out |
| ``acquire`` | a free place | ``release``; the caller's deadline |
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import structlog

from rollstream.config.model import SandboxesConfig
from rollstream.errors import InfraError, RollstreamError, SandboxLostError
from rollstream.v1 import events_pb2
from sandboxes import layers as layers_of
from sandboxes.backends.base import Backend, SessionLimits, inodes
from sandboxes.channel import Channel, RefusedError
from sandboxes.commands import Command
from sandboxes.layers import MAX_LAYERS, Layer

log = structlog.get_logger(__name__)
_T = TypeVar("_T")

_REAP_EVERY_S = 1.0
_RETRY_S = 1.0
_PING_S = 1.0
_REFILL_AFTER_S = 0.003
_REMEMBERED_REQUESTS = 10_000
# Ended commands per session that can still be attached to, with up to twice the cap on output each.
_REMEMBERED_COMMANDS = 2
# Acquire times kept for the median that the live view shows.
_WINDOW = 256


@dataclass(slots=True, kw_only=True)
class Session:
    """A live session and its lease (monotonic seconds)."""

    session_id: str
    toolchain: str
    limits: SessionLimits
    channel: Channel
    lease_s: float
    lease_until: float
    created_at: float = field(default_factory=time.monotonic)
    commands: int = 0
    generation: int = 1
    # Layers below the writable one, uppermost first.
    below: tuple[Layer, ...] = ()
    # What it was made with: a reset goes back to it.
    origin: tuple[Layer, ...] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)
    # The last commands by process id, for attaching.
    history: OrderedDict[str, Command] = field(default_factory=OrderedDict)
    # Held while the guest is replaced.
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def stack(self) -> tuple[Layer, ...]:
        """All its layers, uppermost first."""
        return (self.channel.disk, *self.below) if self.channel.disk is not None else self.below

    def renew(self) -> None:
        self.lease_until = time.monotonic() + self.lease_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What the files of a session were."""

    snapshot_id: str
    toolchain: str
    layers: tuple[Layer, ...]


class SessionTable:
    """All sessions of this executor."""

    def __init__(self, config: SandboxesConfig, backend: Backend) -> None:
        self._config = config
        self._backend = backend
        self._defaults = _default_limits(config)
        self._places = asyncio.Semaphore(config.max_sessions)
        self._live: dict[str, Session] = {}
        self._ready: dict[str, deque[Channel]] = {name: deque() for name in config.pool}
        self._wanted: dict[str, asyncio.Event] = {name: asyncio.Event() for name in config.pool}
        self._requests: OrderedDict[str, asyncio.Future[Any]] = OrderedDict()
        self._snapshots: OrderedDict[str, Snapshot] = OrderedDict()
        # Why sessions died, for calls that come after it.
        self._graves: OrderedDict[str, str] = OrderedDict()
        self._tasks: list[asyncio.Task[None]] = []
        self._commands: set[asyncio.Task[None]] = set()
        self._acquire_s: deque[float] = deque(maxlen=_WINDOW)
        self.creates_total = 0
        self.execs_total = 0
        self.lost_total = 0
        self.expired_total = 0

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._refill(name, target), name=f"refill-{name}")
            for name, target in self._config.pool.items()
        ]
        self._tasks.append(asyncio.create_task(self._reap(), name="reaper"))

    async def stop(self) -> None:
        """End everything: sessions, pool, tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(self.release(s) for s in list(self._live)))
        for channels in self._ready.values():
            await asyncio.gather(*(channel.close() for channel in channels))
            channels.clear()

    @property
    def live(self) -> dict[str, Session]:
        return self._live

    @property
    def ready(self) -> dict[str, int]:
        return {name: len(channels) for name, channels in self._ready.items()}

    @property
    def targets(self) -> dict[str, int]:
        return self._config.pool

    @property
    def toolchains(self) -> tuple[str, ...]:
        return self._backend.toolchains

    def limits_of(self, spec: events_pb2.SandboxSpec) -> SessionLimits:
        return _limits(spec, self._defaults)

    @property
    def acquire_ms_p50(self) -> float:
        ordered = sorted(self._acquire_s)
        return ordered[len(ordered) // 2] * 1000 if ordered else 0.0

    async def acquire(
        self,
        spec: events_pb2.SandboxSpec,
        *,
        request_id: str,
        lease_s: float,
        origin: tuple[Layer, ...] = (),
    ) -> Session:
        """A session for ``spec`` over the layers ``origin``; the same ``request_id`` gives the same
        session.

        Waits for a free place, first come first served, until the caller's deadline cancels it.
        """
        return await self.once(request_id, lambda: self._make(spec, lease_s, origin))

    async def once(self, request_id: str, work: Callable[[], Awaitable[_T]]) -> _T:
        """The result of ``work``; of calls with the same id only the first does it."""
        while (known := self._requests.get(request_id)) is not None:
            try:
                return cast(_T, await asyncio.shield(known))
            except asyncio.CancelledError:
                if not known.cancelled():
                    raise
                # The call that was doing it went away; now it is up to us.
        promise: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        if request_id:
            self._remember(request_id, promise)
        try:
            result = await work()
        except asyncio.CancelledError:
            self._requests.pop(request_id, None)
            promise.cancel()
            raise
        except Exception as error:
            self._requests.pop(request_id, None)
            promise.set_exception(error)
            # Whoever waits gets it too; it is no loss when nobody does.
            promise.exception()
            raise
        promise.set_result(result)
        return result

    async def release(self, session_id: str) -> None:
        """End a session. Not an error when it is gone already."""
        session = self._live.pop(session_id, None)
        if session is None:
            return
        try:
            await session.channel.close()
        except TimeoutError:
            log.error("session did not end in time", session=session_id)
        finally:
            self._places.release()

    async def forget(self, request_id: str) -> None:
        """End the session that this request made, for a caller that did not hear of it.

        A request that is still under way is cancelled by its own call.
        """
        promise = self._requests.get(request_id)
        if promise is not None and promise.done() and not promise.exception():
            made = promise.result()
            if isinstance(made, Session):
                await self.release(made.session_id)

    def run(
        self, session: Session, request: dict[str, Any], *, timeout_s: float, request_id: str
    ) -> Command:
        """Start a command; one that was asked for before with the same id is only found again."""
        for known in session.history.values():
            if request_id and known.request_id == request_id:
                return known
        channel = session.channel
        command = Command(channel, generation=session.generation, request_id=request_id)
        session.history[command.process_id] = command
        for old in [c for c in session.history.values() if c.done][:-_REMEMBERED_COMMANDS]:
            del session.history[old.process_id]
        session.commands += 1
        self.execs_total += 1
        task = command.start(request, timeout_s=timeout_s, lost=lambda: self.lost(session, channel))
        self._commands.add(task)
        task.add_done_callback(self._commands.discard)
        return command

    async def lost(self, session: Session, channel: Channel) -> str:
        """A session died under its user: what is left of it is ended. Returns the cause.

        A guest that was replaced meanwhile was ended on purpose.
        """
        if session.channel is not channel:
            return "replaced"
        group = channel.group
        cause = "oom" if group is not None and group.memory_killed() else "died"
        if session.session_id in self._live:
            self.lost_total += 1
            self._graves[session.session_id] = cause
            while len(self._graves) > _REMEMBERED_REQUESTS:
                self._graves.popitem(last=False)
        await self.release(session.session_id)
        return cause

    async def snapshot(self, session: Session) -> Snapshot:
        """Its files as they are now. Its processes end; the session goes on over the snapshot."""
        self._must_layer()
        async with session.turn:
            await _end_commands(session)
            # Nothing runs any more: the layer does not change, and the new guest may come up over
            # it while the old one ends.
            layers = session.stack
            if len(layers) >= MAX_LAYERS:
                layers = (await self._flatten(session, layers),)
            old = session.channel
            await asyncio.gather(self._replace(session, layers), old.close())
            made = Snapshot(
                snapshot_id=uuid.uuid4().hex, toolchain=session.toolchain, layers=layers
            )
        self._keep(made)
        return made

    async def restore(self, session: Session, layers: tuple[Layer, ...]) -> int:
        """Back to ``layers``, whatever was written since. Returns the new generation."""
        async with session.turn:
            await session.channel.close()
            await self._replace(session, layers)
            session.generation += 1
            session.history.clear()
        return session.generation

    async def reset(self, session: Session) -> int:
        """Back to how it was made. Returns the new generation."""
        generation = await self.restore(session, session.origin)
        if session.files:
            await _put(session.channel, session.files, session.limits.wall_s)
        return generation

    def find_snapshot(self, snapshot_id: str) -> Snapshot:
        """``RefusedError`` when there is none."""
        snapshot = self._snapshots.get(snapshot_id)
        if snapshot is None:
            raise RefusedError(
                f"no snapshot {snapshot_id!r} here: it was dropped, or is of another executor"
            )
        return snapshot

    def drop_snapshot(self, snapshot_id: str) -> None:
        self._snapshots.pop(snapshot_id, None)

    async def pack(self, snapshot: Snapshot) -> bytes:
        """A snapshot as bytes that any executor can ``unpack``."""
        limit = inodes(self._defaults.disk_bytes)
        return await asyncio.to_thread(layers_of.pack, snapshot.layers, limit=limit)

    async def unpack(self, data: bytes, toolchain: str, limits: SessionLimits) -> Layer:
        """A layer with the files of a packed snapshot."""
        self._must_layer()
        # A layer comes with a session; this one is only made for it.
        channel = await self._backend.create(toolchain, limits)
        try:
            layer = channel.disk
        finally:
            await channel.close()
        assert layer is not None, "a backend with layers gives one with each session"
        await asyncio.to_thread(layers_of.unpack, data, layer)
        return layer

    async def _flatten(self, session: Session, layers: tuple[Layer, ...]) -> Layer:
        limit = inodes(session.limits.disk_bytes) * len(layers)
        data = await asyncio.to_thread(layers_of.pack, layers, limit=limit)
        return await self.unpack(data, session.toolchain, session.limits)

    async def _replace(self, session: Session, below: tuple[Layer, ...]) -> None:
        """A new guest for a session whose old one has ended. Where there is none it is over."""
        try:
            channel = await self._backend.create(session.toolchain, session.limits, below)
        except BaseException:
            await self.lost(session, session.channel)
            raise
        if session.session_id not in self._live:
            await channel.close()
            raise SandboxLostError(f"session {session.session_id!r} was ended meanwhile")
        session.channel, session.below = channel, below

    def _keep(self, snapshot: Snapshot) -> None:
        self._snapshots[snapshot.snapshot_id] = snapshot
        while len(self._snapshots) > self._config.max_snapshots:
            dropped, _ = self._snapshots.popitem(last=False)
            log.warning("oldest snapshot dropped", snapshot=dropped)

    def _must_layer(self) -> None:
        if not self._backend.layered:
            raise RefusedError(
                f"no snapshots with the backend {self._backend.name} here: `missing` says why"
            )

    def find(self, session_id: str) -> Session:
        """The session; ``SandboxLostError`` when it is not there (any more)."""
        session = self._live.get(session_id)
        if session is None:
            cause = self._graves.get(session_id)
            raise SandboxLostError(
                f"session {session_id!r} died ({cause})"
                if cause
                else f"no session {session_id!r} here",
                hint="" if cause else "its lease ran out, it died, or it was ended",
            )
        return session

    async def _make(
        self, spec: events_pb2.SandboxSpec, lease_s: float, origin: tuple[Layer, ...]
    ) -> Session:
        started = time.monotonic()
        limits = _limits(spec, self._defaults)
        await self._places.acquire()
        channel: Channel | None = None
        try:
            if not origin:
                channel = await self._take_ready(spec.toolchain, limits)
            if channel is None:
                channel = await self._backend.create(spec.toolchain, limits, origin)
            if spec.files:
                await _put(channel, spec.files, limits.wall_s)
        except BaseException:
            if channel is not None:
                await channel.close()
            self._places.release()
            raise
        lease = lease_s or self._config.lease_s
        session = Session(
            session_id=uuid.uuid4().hex,
            toolchain=spec.toolchain,
            limits=limits,
            channel=channel,
            lease_s=lease,
            lease_until=time.monotonic() + lease,
            below=origin,
            origin=origin,
            files=dict(spec.files),
        )
        self._live[session.session_id] = session
        self.creates_total += 1
        self._acquire_s.append(time.monotonic() - started)
        return session

    async def _take_ready(self, toolchain: str, limits: SessionLimits) -> Channel | None:
        """A pooled session, if one with these limits is there and answers.

        It is asked, not looked at: a member that has just died may not have been reaped yet.
        """
        channels = self._ready.get(toolchain)
        if channels is None or limits != self._defaults:
            return None
        self._wanted[toolchain].set()
        while channels:
            channel = channels.popleft()
            try:
                await channel.open(timeout_s=_PING_S)
            except SandboxLostError:
                await channel.close()
            except BaseException:
                # Cancelled meanwhile: it has no owner but us.
                await channel.close()
                raise
            else:
                return channel
        return None

    async def _refill(self, toolchain: str, target: int) -> None:
        channels, wanted = self._ready[toolchain], self._wanted[toolchain]
        while True:
            wanted.clear()
            while len(channels) < target:
                try:
                    channels.append(await self._backend.create(toolchain, self._defaults))
                except RollstreamError as error:
                    log.error("pool cannot be filled", toolchain=toolchain, error=str(error))
                    await asyncio.sleep(_RETRY_S)
            await wanted.wait()
            # The answer of who took it goes first: making a session takes the processors.
            await asyncio.sleep(_REFILL_AFTER_S)

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(_REAP_EVERY_S)
            now = time.monotonic()
            for session in [s for s in self._live.values() if s.lease_until < now]:
                self.expired_total += 1
                log.warning("lease ran out", session=session.session_id)
                with contextlib.suppress(InfraError):
                    await self.release(session.session_id)

    def _remember(self, request_id: str, promise: asyncio.Future[Any]) -> None:
        self._requests[request_id] = promise
        while len(self._requests) > _REMEMBERED_REQUESTS:
            self._requests.popitem(last=False)


def _default_limits(config: SandboxesConfig) -> SessionLimits:
    limits = config.limits
    return SessionLimits(
        memory_bytes=limits.memory_bytes,
        pids=limits.pids,
        disk_bytes=limits.disk_bytes,
        wall_s=limits.wall_s,
        output_bytes=limits.output_bytes,
        cpus=limits.cpus,
    )


async def _put(channel: Channel, files: Mapping[str, bytes], timeout_s: float) -> None:
    async for _ in channel.request({"op": "put", "files": dict(files)}, timeout_s=timeout_s):
        pass


async def _end_commands(session: Session) -> None:
    """Kill what runs and wait for its end: it is a result, and not the session's death."""
    for command in session.history.values():
        await command.kill()
    async for _ in session.channel.request({"op": "sweep"}, timeout_s=_PING_S):
        pass


def _limits(spec: events_pb2.SandboxSpec, defaults: SessionLimits) -> SessionLimits:
    return SessionLimits(
        memory_bytes=spec.memory_bytes or defaults.memory_bytes,
        pids=spec.pids or defaults.pids,
        disk_bytes=spec.disk_bytes or defaults.disk_bytes,
        wall_s=defaults.wall_s,
        output_bytes=defaults.output_bytes,
        cpus=defaults.cpus,
    )
