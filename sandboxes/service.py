"""The gRPC face of an executor: thin, over the session table.

Status codes: INVALID_ARGUMENT what was asked for cannot be, NOT_FOUND the session is gone or died,
RESOURCE_EXHAUSTED no free session within the deadline, UNAVAILABLE a session cannot be made now.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any, NoReturn, TypeAlias

import grpc
import grpc.aio

from rollstream import telemetry
from rollstream.errors import ConfigError, InfraError, SandboxLostError
from rollstream.telemetry import tracer
from rollstream.v1 import sandbox_pb2 as pb
from rollstream.v1 import sandbox_pb2_grpc
from sandboxes.backends.base import Isolation
from sandboxes.channel import Exit, Output, RefusedError
from sandboxes.sessions import Session, SessionTable

_FILE_TIMEOUT_S = 30.0
_DEFAULT_ENV = {"PATH": "/usr/bin:/bin", "HOME": "/work", "LANG": "C.UTF-8"}
# Left for the answer when a caller's deadline ends a wait.
_MARGIN_S = 0.2
Context: TypeAlias = Any  # grpc.aio.ServicerContext: the library has no types


class SandboxServicer(sandbox_pb2_grpc.SandboxServiceServicer):
    """SandboxService over one backend."""

    def __init__(self, table: SessionTable, isolation: Isolation, *, max_sessions: int) -> None:
        self._table = table
        self._isolation = isolation
        self._max_sessions = max_sessions

    async def Create(self, request: pb.CreateRequest, context: Context) -> pb.CreateResponse:  # noqa: N802
        if not request.spec.toolchain:
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, "spec.toolchain is empty")
        started = time.monotonic()
        left = context.time_remaining()
        with _span(context, "sandbox create"):
            async with _mapped(context):
                try:
                    async with asyncio.timeout(
                        None if left is None else max(0.0, left - _MARGIN_S)
                    ):
                        session = await self._table.acquire(
                            request.spec, request_id=request.request_id, lease_s=request.lease_s
                        )
                except TimeoutError:
                    await _abort(
                        context,
                        grpc.StatusCode.RESOURCE_EXHAUSTED,
                        f"no free session within {left:.1f} s ({self._max_sessions} are in use)",
                    )
        return pb.CreateResponse(
            session_id=session.session_id,
            tier=self._isolation.tier,
            missing=self._isolation.missing,
            lease_s=session.lease_s,
            wait_s=time.monotonic() - started,
        )

    async def List(self, request: pb.ListRequest, context: Context) -> pb.ListResponse:  # noqa: N802
        now = time.monotonic()
        return pb.ListResponse(
            sessions=[
                pb.SessionInfo(
                    session_id=s.session_id,
                    toolchain=s.toolchain,
                    age_s=now - s.created_at,
                    lease_left_s=s.lease_until - now,
                    commands=s.commands,
                )
                for s in self._table.live.values()
            ]
        )

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
                pb.ToolchainCapacity(toolchain=name, ready=ready)
                for name, ready in self._table.ready.items()
            ],
        )

    async def Exec(  # noqa: N802
        self, request: pb.ExecRequest, context: Context
    ) -> AsyncIterator[pb.ExecResponse]:
        async with _mapped(context):
            session = self._table.find(request.session_id)
            session.commands += 1
            self._table.execs_total += 1
            limit = min(request.timeout_s or session.limits.wall_s, session.limits.wall_s)
            seq = 0
            async for part in self._call(session, _command(request, session, limit), limit):
                yield _frame(seq, part)
                seq += 1

    async def PutFiles(self, request: pb.PutFilesRequest, context: Context) -> pb.PutFilesResponse:  # noqa: N802
        async with _mapped(context):
            session = self._table.find(request.session_id)
            command = {"op": "put", "files": dict(request.files)}
            async for _ in self._call(session, command, _FILE_TIMEOUT_S):
                pass
        return pb.PutFilesResponse()

    async def GetFiles(self, request: pb.GetFilesRequest, context: Context) -> pb.GetFilesResponse:  # noqa: N802
        files = {}
        async with _mapped(context):
            session = self._table.find(request.session_id)
            command = {"op": "get", "paths": list(request.paths)}
            async for part in self._call(session, command, _FILE_TIMEOUT_S):
                if isinstance(part, Output):
                    name, _, data = part.data.partition(b"\0")
                    files[name.decode("utf-8", "replace")] = data
        return pb.GetFilesResponse(files=files)

    async def _call(
        self, session: Session, command: dict[str, Any], timeout_s: float
    ) -> AsyncIterator[Output | Exit]:
        session.renew()
        try:
            async for part in session.channel.request(command, timeout_s=timeout_s):
                yield part
        except SandboxLostError:
            await self._table.lost(session.session_id)
            raise
        session.renew()


def _command(request: pb.ExecRequest, session: Session, timeout_s: float) -> dict[str, Any]:
    cap = session.limits.output_bytes
    command: dict[str, Any] = {
        "stdin": request.stdin,
        "cap": min(request.output_bytes or cap, cap),
        "limits": session.limits.rlimits(),
        "env": {**_DEFAULT_ENV, **request.env},
        "cwd": request.cwd,
        "timeout_s": timeout_s,
    }
    if request.WhichOneof("command") == "python":
        return {**command, "op": "python", "code": request.python}
    if not request.argv.values:
        raise RefusedError("the command is empty")
    return {**command, "op": "exec", "argv": list(request.argv.values)}


def _frame(seq: int, part: Output | Exit) -> pb.ExecResponse:
    if isinstance(part, Exit):
        exited = pb.Exited(
            code=part.code,
            reason=part.reason,
            wall_s=part.wall_s,
            cpu_s=part.cpu_s,
            max_rss_bytes=part.max_rss_bytes,
            dropped_bytes=part.dropped_bytes,
        )
        return pb.ExecResponse(seq=seq, exited=exited)
    if part.stream == "stdout":
        return pb.ExecResponse(seq=seq, stdout=part.data)
    return pb.ExecResponse(seq=seq, stderr=part.data)


@contextlib.contextmanager
def _span(context: Context, name: str):  # type: ignore[no-untyped-def]
    parent = telemetry.extract(tuple(context.invocation_metadata() or ()))
    with tracer.start_as_current_span(name, context=parent) as span:
        yield span


@contextlib.asynccontextmanager
async def _mapped(context: Context) -> AsyncIterator[None]:
    """Our errors as gRPC statuses."""
    try:
        yield
    except RefusedError as error:
        await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
    except ConfigError as error:
        await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
    except SandboxLostError as error:
        await _abort(context, grpc.StatusCode.NOT_FOUND, str(error))
    except InfraError as error:
        await _abort(context, grpc.StatusCode.UNAVAILABLE, str(error))


async def _abort(context: Context, code: grpc.StatusCode, message: str) -> NoReturn:
    await context.abort(code, message)
    raise AssertionError("abort raises")
