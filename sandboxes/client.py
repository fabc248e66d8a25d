"""The client of sandbox executors: sessions that end with the block that opened them.

Executors are chosen by label and load: of those that have the toolchain two are drawn, and the one
with more free sessions (as it last said, less those that we opened since) is asked; when it cannot
be reached the next is tried, until the budget is spent. A session stays on its executor. Leases are
renewed in the background as long as the client lives; a client that dies stops renewing, and its
sessions end.

| task | waits for | unblocked by |
|---|---|---|
| ``renew`` | a third of the lease | time |
| ``look`` | what executors say of their load | time |
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NoReturn

import grpc
import grpc.aio
import structlog

from rollstream import telemetry
from rollstream.errors import ConfigError, ContractError, InfraError, SandboxLostError
from rollstream.sandbox import ExecResult
from rollstream.v1 import events_pb2, sandbox_pb2_grpc
from rollstream.v1 import sandbox_pb2 as pb

log = structlog.get_logger(__name__)

_OPTIONS = (
    ("grpc.max_receive_message_length", 256 << 20),
    ("grpc.max_send_message_length", 256 << 20),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
)
# A call may take this much longer than the command it runs.
_CALL_MARGIN_S = 10.0
_FILE_CALL_S = 60.0
_DESTROY_S = 10.0
_RETRY_S = 0.3
_LOOK_S = 2.0
# The caller is wrong: about what it asks for, or about the session's generation.
_WRONG = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)
_TRY_NEXT = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
)


class _Executor:
    """One executor as the client sees it."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.channel = grpc.aio.insecure_channel(target, options=_OPTIONS)
        self.stub = sandbox_pb2_grpc.SandboxServiceStub(self.channel)
        self.sessions: set[str] = set()
        # As it last said; None before it was heard of.
        self.toolchains: frozenset[str] | None = None
        self.free = 0
        self.opened_since = 0

    async def look(self) -> None:
        """Ask for its load. One that does not answer is taken for full, and asked again."""
        try:
            said = await self.stub.Capacity(pb.CapacityRequest(), timeout=_LOOK_S)
        except grpc.aio.AioRpcError:
            self.free = 0
            return
        self.toolchains = frozenset(t.toolchain for t in said.toolchains)
        self.free, self.opened_since = said.free_sessions, 0


class Session:
    """A session on one executor; satisfies ``rollstream.sandbox.SandboxSession``."""

    def __init__(self, executor: _Executor, made: pb.CreateResponse) -> None:
        self._executor = executor
        self._id = made.session_id
        self.wait_s = made.wait_s
        self.tier = made.tier
        self.missing = tuple(made.missing)
        self.generation = made.generation

    @property
    def session_id(self) -> str:
        return self._id

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        timeout_s: float = 10.0,
    ) -> ExecResult:
        """Run a command to its end."""
        request = pb.ExecRequest(
            session_id=self._id,
            argv=pb.Argv(values=argv),
            stdin=stdin,
            cwd=cwd,
            env=dict(env or {}),
            timeout_s=timeout_s,
            generation=self.generation,
        )
        return await self._run(request)

    async def run_python(self, code: str, *, timeout_s: float = 10.0) -> ExecResult:
        """Run a script in a fork of the warm interpreter."""
        return await self._run(
            pb.ExecRequest(
                session_id=self._id, python=code, timeout_s=timeout_s, generation=self.generation
            )
        )

    async def put_files(self, files: Mapping[str, bytes], *, hidden: bool = False) -> None:
        """Write files, relative to the work folder.

        ``hidden``: they are a verifier's. Whatever runs in the session is killed first, and what
        was planted in their place is removed.
        """
        request = pb.PutFilesRequest(
            session_id=self._id, files=dict(files), hidden=hidden, generation=self.generation
        )
        await self._call(self._executor.stub.PutFiles, request)

    async def snapshot(self) -> str:
        """Its files as they are now, by an id of this executor. Its processes end."""
        request = pb.SnapshotRequest(
            request_id=uuid.uuid4().hex, session_id=self._id, generation=self.generation
        )
        answer: pb.SnapshotResponse = await self._call(self._executor.stub.Snapshot, request)
        return answer.snapshot_id

    async def restore(self, snapshot_id: str) -> None:
        """Back to a snapshot, whatever was written since."""
        request = pb.RestoreRequest(
            request_id=uuid.uuid4().hex,
            session_id=self._id,
            generation=self.generation,
            snapshot_id=snapshot_id,
        )
        answer: pb.RestoreResponse = await self._call(self._executor.stub.Restore, request)
        self.generation = answer.generation

    async def reset(self) -> None:
        """Back to how it was made."""
        request = pb.ResetRequest(
            request_id=uuid.uuid4().hex, session_id=self._id, generation=self.generation
        )
        answer: pb.ResetResponse = await self._call(self._executor.stub.Reset, request)
        self.generation = answer.generation

    async def export(self, snapshot_id: str) -> events_pb2.BlobRef:
        """A snapshot to the blob store, for ``SandboxClient.session(blob=...)``."""
        request = pb.ExportSnapshotRequest(snapshot_id=snapshot_id)
        answer: pb.ExportSnapshotResponse = await self._call(
            self._executor.stub.ExportSnapshot, request
        )
        return answer.blob

    async def get_files(self, paths: Sequence[str]) -> Mapping[str, bytes]:
        """Read regular files."""
        request = pb.GetFilesRequest(session_id=self._id, paths=paths)
        answer: pb.GetFilesResponse = await self._call(self._executor.stub.GetFiles, request)
        return dict(answer.files)

    async def _call(self, method: Any, request: Any) -> Any:
        try:
            return await method(request, timeout=_FILE_CALL_S)
        except grpc.aio.AioRpcError as error:
            self._raise(error)

    async def _run(self, request: pb.ExecRequest) -> ExecResult:
        out: list[bytes] = []
        err: list[bytes] = []
        try:
            frames = self._executor.stub.Exec(
                request,
                timeout=request.timeout_s + _CALL_MARGIN_S,
                metadata=telemetry.inject_metadata(),
            )
            async for frame in frames:
                kind = frame.WhichOneof("frame")
                if kind == "exited":
                    return _result(frame.exited, b"".join(out), b"".join(err))
                if kind in {"stdout", "stderr"}:
                    (out if kind == "stdout" else err).append(getattr(frame, kind))
        except grpc.aio.AioRpcError as error:
            self._raise(error)
        raise SandboxLostError(f"session {self._id}: the command's end never came")

    def _raise(self, error: grpc.aio.AioRpcError) -> NoReturn:
        where = f"session {self._id} on {self._executor.target}"
        if error.code() in _WRONG:
            raise ContractError(f"{where}: {error.details()}") from error
        # NOT_FOUND: it died. Anything else: the executor is gone, and its sessions with it.
        raise SandboxLostError(f"{where}: {error.details()} ({error.code().name})") from error


class SandboxClient:
    """Opens sessions on one of several executors. Use as an async context manager."""

    def __init__(
        self, targets: Sequence[str], *, budget_s: float = 60.0, lease_s: float = 30.0
    ) -> None:
        """``targets``: host:port each. ``budget_s``: how long opening a session is tried."""
        if not targets:
            raise ConfigError(
                "no sandbox executor is named",
                hint='set rollouts.sandbox_targets=["host:port"], or run the service sandboxes',
            )
        self._targets = tuple(targets)
        self._budget_s = budget_s
        self._lease_s = lease_s
        self._executors: list[_Executor] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> SandboxClient:
        self._executors = [_Executor(target) for target in self._targets]
        self._tasks = [
            asyncio.create_task(self._renew(), name="renew"),
            asyncio.create_task(self._look(), name="look"),
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for executor in self._executors:
            await executor.channel.close()

    @contextlib.asynccontextmanager
    async def session(
        self,
        spec: events_pb2.SandboxSpec,
        *,
        fork: tuple[Session, str] | None = None,
        blob: events_pb2.BlobRef | None = None,
    ) -> AsyncIterator[Session]:
        """A session for the time of the block.

        ``fork``: a session and a snapshot of it, to start from on the same executor. ``blob``: an
        exported snapshot, to start from on any.

        Raises:
            InfraError: no executor gave one within the budget.
            ContractError: no executor can give one (unknown toolchain).
        """
        request = pb.CreateRequest(
            request_id=uuid.uuid4().hex,
            spec=spec,
            lease_s=self._lease_s,
            from_snapshot=fork[1] if fork else "",
            from_blob=blob,
        )
        executor, answer = await self._create(request, fork[0]._executor if fork else None)
        executor.sessions.add(answer.session_id)
        try:
            yield Session(executor, answer)
        finally:
            executor.sessions.discard(answer.session_id)
            # Shielded: a cancelled caller still ends its session; a lost answer ends with its
            # lease.
            end = pb.DestroyRequest(session_id=answer.session_id)
            await asyncio.shield(self._destroy(executor, end))

    async def _create(
        self, request: pb.CreateRequest, only: _Executor | None
    ) -> tuple[_Executor, pb.CreateResponse]:
        deadline = time.monotonic() + self._budget_s
        last = "never tried"
        while (left := deadline - time.monotonic()) > 0:
            executor = only or self._choose(request.spec.toolchain)
            executor.opened_since += 1
            call = executor.stub.Create(request, timeout=left, metadata=telemetry.inject_metadata())
            try:
                return executor, await call
            except asyncio.CancelledError:
                # The session may be there and its answer on the way: nobody would end it.
                forget = pb.DestroyRequest(request_id=request.request_id)
                await asyncio.shield(self._destroy(executor, forget))
                raise
            except grpc.aio.AioRpcError as error:
                last = f"{executor.target}: {error.details()} ({error.code().name})"
                if error.code() not in _TRY_NEXT:
                    raise ContractError(f"no sandbox: {last}") from error
            await asyncio.sleep(_RETRY_S)
        raise InfraError(
            f"no sandbox from {', '.join(self._targets)} within {self._budget_s:.0f} s;"
            f" last: {last}",
            hint="is the service sandboxes up, and does rollouts.sandbox_targets name it?",
        )

    def _choose(self, toolchain: str) -> _Executor:
        """Two random choices among those that have the toolchain (Mitzenmacher 2001)."""
        able = [e for e in self._executors if e.toolchains is None or toolchain in e.toolchains]
        # Where none has it one is asked all the same: it names what it has.
        able = able or self._executors
        pair = random.sample(able, k=min(2, len(able)))
        return max(pair, key=lambda executor: executor.free - executor.opened_since)

    async def _look(self) -> None:
        while True:
            await asyncio.gather(*(executor.look() for executor in self._executors))
            await asyncio.sleep(_LOOK_S)

    async def _destroy(self, executor: _Executor, request: pb.DestroyRequest) -> None:
        try:
            await executor.stub.Destroy(request, timeout=_DESTROY_S)
        except grpc.aio.AioRpcError as error:
            name = request.session_id or request.request_id
            log.warning("session left to its lease", session=name, code=error.code().name)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            for executor in self._executors:
                if not executor.sessions:
                    continue
                request = pb.RenewLeaseRequest(session_ids=sorted(executor.sessions))
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await executor.stub.RenewLease(request, timeout=self._lease_s / 3)


def _result(exited: pb.Exited, stdout: bytes, stderr: bytes) -> ExecResult:
    return ExecResult(
        exit_code=exited.code,
        reason=exited.reason,
        stdout=stdout,
        stderr=stderr,
        dropped_bytes=exited.dropped_bytes,
        wall_s=exited.wall_s,
    )
