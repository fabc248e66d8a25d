"""The sessions of one executor: made, pooled, leased, ended.

Invariants: a session has exactly one owner from before it is made until it is closed (the pool, the
table, or the call that is making it), so that a cancelled call leaks nothing; a session is never
used twice; live sessions never exceed ``max_sessions``.

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
from dataclasses import dataclass, field

import structlog

from rollstream.config.model import SandboxesConfig
from rollstream.errors import InfraError, RollstreamError, SandboxLostError
from rollstream.v1 import events_pb2
from sandboxes.backends.base import Backend, SessionLimits
from sandboxes.channel import Channel

log = structlog.get_logger(__name__)

_REAP_EVERY_S = 1.0
_RETRY_S = 1.0
_PING_S = 1.0
_REMEMBERED_REQUESTS = 10_000
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

    def renew(self) -> None:
        self.lease_until = time.monotonic() + self.lease_s


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
        self._requests: OrderedDict[str, asyncio.Future[Session]] = OrderedDict()
        self._tasks: list[asyncio.Task[None]] = []
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
    def acquire_ms_p50(self) -> float:
        ordered = sorted(self._acquire_s)
        return ordered[len(ordered) // 2] * 1000 if ordered else 0.0

    async def acquire(
        self, spec: events_pb2.SandboxSpec, *, request_id: str, lease_s: float
    ) -> Session:
        """A session for ``spec``; the same ``request_id`` gives the same session.

        Waits for a free place, first come first served, until the caller's deadline cancels it.
        """
        while (known := self._requests.get(request_id)) is not None:
            try:
                return await asyncio.shield(known)
            except asyncio.CancelledError:
                if not known.cancelled():
                    raise
                # The call that was making it went away; now it is up to us.
        promise: asyncio.Future[Session] = asyncio.get_running_loop().create_future()
        if request_id:
            self._remember(request_id, promise)
        try:
            session = await self._make(spec, lease_s=lease_s)
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
        promise.set_result(session)
        return session

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
            await self.release(promise.result().session_id)

    async def lost(self, session_id: str) -> None:
        """A session died under its user: what is left of it is ended."""
        self.lost_total += 1
        await self.release(session_id)

    def find(self, session_id: str) -> Session:
        """The session; ``SandboxLostError`` when it is not there (any more)."""
        session = self._live.get(session_id)
        if session is None:
            raise SandboxLostError(
                f"no session {session_id!r} here",
                hint="its lease ran out, it died, or it was ended",
            )
        return session

    async def _make(self, spec: events_pb2.SandboxSpec, *, lease_s: float) -> Session:
        started = time.monotonic()
        limits = _limits(spec, self._defaults)
        await self._places.acquire()
        channel: Channel | None = None
        try:
            channel = await self._take_ready(spec.toolchain, limits)
            if channel is None:
                channel = await self._backend.create(spec.toolchain, limits)
            if spec.files:
                async for _ in channel.request(
                    {"op": "put", "files": dict(spec.files)}, timeout_s=limits.wall_s
                ):
                    pass
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

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(_REAP_EVERY_S)
            now = time.monotonic()
            for session in [s for s in self._live.values() if s.lease_until < now]:
                self.expired_total += 1
                log.warning("lease ran out", session=session.session_id)
                with contextlib.suppress(InfraError):
                    await self.release(session.session_id)

    def _remember(self, request_id: str, promise: asyncio.Future[Session]) -> None:
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
    )


def _limits(spec: events_pb2.SandboxSpec, defaults: SessionLimits) -> SessionLimits:
    return SessionLimits(
        memory_bytes=spec.memory_bytes or defaults.memory_bytes,
        pids=spec.pids or defaults.pids,
        disk_bytes=spec.disk_bytes or defaults.disk_bytes,
        wall_s=defaults.wall_s,
        output_bytes=defaults.output_bytes,
    )
