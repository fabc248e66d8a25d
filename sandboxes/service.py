"""The gRPC face of an executor: thin, over the session table. Sessions and commands; files and
statuses are in ``service_files``.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc

from rollstream import telemetry
from rollstream.blobs import BlobStore
from rollstream.telemetry import tracer
from rollstream.v1 import events_pb2
from rollstream.v1 import sandbox_pb2 as pb
from sandboxes.backends.base import Isolation, SessionLimits
from sandboxes.channel import RefusedError
from sandboxes.commands import Command, Ended, Frame, Heartbeat, Started
from sandboxes.layers import Layer
from sandboxes.service_files import Context, FilesServicer, abort, mapped
from sandboxes.sessions import Session, SessionTable

_MAX_INPUT_BYTES = 1 << 20
_SNAPSHOT_TYPE = "application/x-tar"
_DEFAULT_ENV = {"PATH": "/usr/bin:/bin", "HOME": "/work", "LANG": "C.UTF-8"}
# Left for the answer when a caller's deadline ends a wait.
_MARGIN_S = 0.2


class SandboxServicer(FilesServicer):
    """SandboxService over one backend. ``serving``: false once the executor drains."""

    def __init__(
        self, table: SessionTable, isolation: Isolation, *, max_sessions: int, blobs: BlobStore
    ) -> None:
        super().__init__(table)
        self.serving = True
        self._blobs = blobs
        self._isolation = isolation
        self._max_sessions = max_sessions

    async def Create(self, request: pb.CreateRequest, context: Context) -> pb.CreateResponse:  # noqa: N802
        if not request.spec.toolchain:
            await abort(
                context, grpc.StatusCode.INVALID_ARGUMENT, "spec.toolchain is empty", "REFUSED"
            )
        started = time.monotonic()
        left = context.time_remaining()
        with _span(context, "sandbox create"):
            async with mapped(context):
                try:
                    async with asyncio.timeout(
                        None if left is None else max(0.0, left - _MARGIN_S)
                    ):
                        session = await self._table.acquire(
                            request.spec,
                            request_id=request.request_id,
                            lease_s=request.lease_s,
                            origin=await self._origin(request),
                        )
                except TimeoutError:
                    await abort(
                        context,
                        grpc.StatusCode.RESOURCE_EXHAUSTED,
                        f"no free session within {left:.1f} s ({self._max_sessions} are in use)",
                        "NO_FREE_SESSION",
                    )
        return pb.CreateResponse(
            session_id=session.session_id,
            tier=self._isolation.tier,
            missing=self._isolation.missing,
            lease_s=session.lease_s,
            wait_s=time.monotonic() - started,
            generation=session.generation,
        )

    async def Get(self, request: pb.GetRequest, context: Context) -> pb.GetResponse:  # noqa: N802
        async with mapped(context):
            session = self._table.find(request.session_id)
        return pb.GetResponse(session=_info(session, time.monotonic()))

    async def List(self, request: pb.ListRequest, context: Context) -> pb.ListResponse:  # noqa: N802
        now = time.monotonic()
        return pb.ListResponse(sessions=[_info(s, now) for s in self._table.live.values()])

    async def RenewLease(  # noqa: N802
        self, request: pb.RenewLeaseRequest, context: Context
    ) -> pb.RenewLeaseResponse:
        gone = []
        for session_id in request.session_ids:
            session = self._table.live.get(session_id)
            if session is None:
                gone.append(session_id)
            else:
                session.renew()
        return pb.RenewLeaseResponse(gone=gone)

    async def Destroy(self, request: pb.DestroyRequest, context: Context) -> pb.DestroyResponse:  # noqa: N802
        await self._table.release(request.session_id)
        await self._table.forget(request.request_id)
        return pb.DestroyResponse()

    async def Capacity(  # noqa: N802
        self, request: pb.CapacityRequest, context: Context
    ) -> pb.CapacityResponse:
        return pb.CapacityResponse(
            max_sessions=self._max_sessions,
            live_sessions=len(self._table.live),
            tier=self._isolation.tier,
            missing=self._isolation.missing,
            toolchains=[
                pb.ToolchainCapacity(
                    toolchain=name,
                    ready=self._table.ready.get(name, 0),
                    target=self._table.targets.get(name, 0),
                )
                for name in self._table.toolchains
            ],
            free_sessions=self._max_sessions - len(self._table.live) if self.serving else 0,
        )

    async def Exec(  # noqa: N802
        self, request: pb.ExecRequest, context: Context
    ) -> AsyncIterator[pb.ExecResponse]:
        async with mapped(context):
            session = self._find(request)
            limit = min(request.timeout_s or session.limits.wall_s, session.limits.wall_s)
            session.renew()
            command = self._table.run(
                session,
                _command(request, session, limit),
                timeout_s=limit,
                request_id=request.request_id,
            )
            try:
                async for number, part in command.frames():
                    yield _frame(number, part)
            finally:
                if not request.request_id and not command.done:
                    # Nobody could ever hear of it again.
                    await command.kill()
            session.renew()

    async def Attach(  # noqa: N802
        self, request: pb.AttachRequest, context: Context
    ) -> AsyncIterator[pb.AttachResponse]:
        async with mapped(context):
            command = self._process(request)
            async for number, part in command.frames(request.from_seq):
                yield pb.AttachResponse(frame=_frame(number, part))

    async def WriteStdin(  # noqa: N802
        self, request: pb.WriteStdinRequest, context: Context
    ) -> pb.WriteStdinResponse:
        async with mapped(context):
            if len(request.data) > _MAX_INPUT_BYTES:
                raise RefusedError(f"{len(request.data)} bytes at once, {_MAX_INPUT_BYTES} may be")
            await self._process(request).write_stdin(request.data, eof=request.eof)
        return pb.WriteStdinResponse()

    async def Signal(self, request: pb.SignalRequest, context: Context) -> pb.SignalResponse:  # noqa: N802
        async with mapped(context):
            if not 0 < request.signal < 65:
                raise RefusedError(f"no signal {request.signal}: 1 to 64")
            await self._process(request).signal(request.signal)
        return pb.SignalResponse()

    async def Reset(self, request: pb.ResetRequest, context: Context) -> pb.ResetResponse:  # noqa: N802
        async with mapped(context):
            # A repeated call comes with the generation of before: it is known by its id.
            work = lambda: self._table.reset(self._find(request))  # noqa: E731
            return pb.ResetResponse(generation=await self._table.once(request.request_id, work))

    async def Snapshot(  # noqa: N802
        self, request: pb.SnapshotRequest, context: Context
    ) -> pb.SnapshotResponse:
        async with mapped(context):
            session = self._find(request)
            work = lambda: self._table.snapshot(session)  # noqa: E731
            made = await self._table.once(request.request_id, work)
        return pb.SnapshotResponse(snapshot_id=made.snapshot_id, layers=len(made.layers))

    async def Restore(self, request: pb.RestoreRequest, context: Context) -> pb.RestoreResponse:  # noqa: N802
        async with mapped(context):

            async def work() -> int:
                found = self._find(request)
                if request.WhichOneof("source") == "blob":
                    layers = await self._fetch(request.blob, found.toolchain, found.limits)
                else:
                    layers = self._table.find_snapshot(request.snapshot_id).layers
                return await self._table.restore(found, layers)

            return pb.RestoreResponse(generation=await self._table.once(request.request_id, work))

    async def ExportSnapshot(  # noqa: N802
        self, request: pb.ExportSnapshotRequest, context: Context
    ) -> pb.ExportSnapshotResponse:
        async with mapped(context):
            data = await self._table.pack(self._table.find_snapshot(request.snapshot_id))
            blob = await asyncio.to_thread(self._blobs.put, data, media_type=_SNAPSHOT_TYPE)
        return pb.ExportSnapshotResponse(blob=blob)

    async def DropSnapshot(  # noqa: N802
        self, request: pb.DropSnapshotRequest, context: Context
    ) -> pb.DropSnapshotResponse:
        self._table.drop_snapshot(request.snapshot_id)
        return pb.DropSnapshotResponse()

    async def _fetch(
        self, blob: events_pb2.BlobRef, toolchain: str, limits: SessionLimits
    ) -> tuple[Layer, ...]:
        data = await asyncio.to_thread(self._blobs.get, blob)
        return (await self._table.unpack(data, toolchain, limits),)

    async def _origin(self, request: pb.CreateRequest) -> tuple[Layer, ...]:
        if request.HasField("from_blob"):
            limits = self._table.limits_of(request.spec)
            return await self._fetch(request.from_blob, request.spec.toolchain, limits)
        if request.from_snapshot:
            return self._table.find_snapshot(request.from_snapshot).layers
        return ()

    def _process(self, request: Any) -> Command:
        session = self._table.find(request.session_id)
        command = session.history.get(request.process_id)
        if command is None:
            raise RefusedError(
                f"session {session.session_id} has no process {request.process_id!r}: "
                "it ended long ago, or before a reset"
            )
        session.renew()
        return command


def _command(request: pb.ExecRequest, session: Session, timeout_s: float) -> dict[str, Any]:
    cap = session.limits.output_bytes
    group = session.channel.group
    counted = tuple(group.folders) if group is not None else ()
    command: dict[str, Any] = {
        "stdin": request.stdin,
        "keep_stdin_open": request.keep_stdin_open,
        "cap": min(request.output_bytes or cap, cap),
        "limits": session.limits.rlimits(counted=counted),
        "memory_bytes": 0 if "memory" in counted else session.limits.memory_bytes,
        "env": {**_DEFAULT_ENV, **request.env},
        "cwd": request.cwd,
        "timeout_s": timeout_s,
    }
    if request.WhichOneof("command") == "python":
        return {**command, "op": "python", "code": request.python}
    if not request.argv.values:
        raise RefusedError("the command is empty")
    return {**command, "op": "exec", "argv": list(request.argv.values)}


def _frame(number: int, part: Frame) -> pb.ExecResponse:
    match part:
        case Started():
            started = pb.Started(process_id=part.process_id, generation=part.generation)
            return pb.ExecResponse(seq=number, started=started)
        case Heartbeat():
            return pb.ExecResponse(seq=number, heartbeat=pb.Heartbeat(elapsed_s=part.elapsed_s))
        case Ended():
            return pb.ExecResponse(seq=number, exited=_exited(part))
    if part.stream == "truncated":
        stream = "stdout" if part.data[:1] == b"o" else "stderr"
        truncated = pb.Truncated(stream=stream, dropped_bytes=int(part.data[1:]))
        return pb.ExecResponse(seq=number, truncated=truncated)
    if part.stream == "stdout":
        return pb.ExecResponse(seq=number, stdout=part.data)
    return pb.ExecResponse(seq=number, stderr=part.data)


def _exited(ended: Ended) -> pb.Exited:
    end = ended.exit
    return pb.Exited(
        code=end.code,
        reason=end.reason,
        wall_s=end.wall_s,
        cpu_s=end.cpu_s,
        max_rss_bytes=end.max_rss_bytes,
        dropped_bytes=end.dropped_bytes,
        signal=max(0, -end.code),
        limits_hit=ended.limits_hit,
    )


def _info(session: Session, now: float) -> pb.SessionInfo:
    running = next((c.process_id for c in session.history.values() if c.running), "")
    group = session.channel.group
    return pb.SessionInfo(
        session_id=session.session_id,
        toolchain=session.toolchain,
        age_s=now - session.created_at,
        lease_left_s=session.lease_until - now,
        commands=session.commands,
        generation=session.generation,
        process_id=running,
        memory_bytes=group.memory_bytes() if group is not None else 0,
    )


@contextlib.contextmanager
def _span(context: Context, name: str):  # type: ignore[no-untyped-def]
    parent = telemetry.extract(tuple(context.invocation_metadata() or ()))
    with tracer.start_as_current_span(name, context=parent) as span:
        yield span
