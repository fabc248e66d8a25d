"""Files of sessions over gRPC, and how errors become statuses.

Everything about files is done by the guest, inside the session: paths are relative to the work
folder and no link is followed, so that nothing outside can be reached.

Status codes: INVALID_ARGUMENT what was asked for cannot be, NOT_FOUND the session is gone or died,
FAILED_PRECONDITION it is of another generation, RESOURCE_EXHAUSTED no free session within the
deadline, UNAVAILABLE a session cannot be made now. Each carries one ErrorInfo.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import stat
import uuid
from collections.abc import AsyncIterator
from itertools import islice
from typing import Any, NoReturn, TypeAlias

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from rollstream.errors import ConfigError, ContractError, InfraError, SandboxLostError
from rollstream.v1 import sandbox_pb2 as pb
from rollstream.v1 import sandbox_pb2_grpc
from sandboxes import layers as layers_of
from sandboxes.backends.base import inodes
from sandboxes.channel import Exit, Output, RefusedError
from sandboxes.sessions import Session, SessionTable

DOMAIN = "rollstream.sandboxes"
_FILE_TIMEOUT_S = 30.0
_MAX_ENTRIES = 10_000
_KINDS = {
    stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link", stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
}  # fmt: skip
_ODD = re.compile(rb"\\|[^\x00-\x7f]+")
Context: TypeAlias = Any  # grpc.aio.ServicerContext: the library has no types


class StaleError(Exception):
    """The caller believes in a generation of the session that is gone."""


class FilesServicer(sandbox_pb2_grpc.SandboxServiceServicer):
    """The part of SandboxService that is about files."""

    def __init__(self, table: SessionTable) -> None:
        self._table = table

    async def PutFiles(self, request: pb.PutFilesRequest, context: Context) -> pb.PutFilesResponse:  # noqa: N802
        async with mapped(context):
            session = self._find(request)
            if request.hidden:
                for running in session.history.values():
                    await running.kill()
            command = {"op": "put", "files": dict(request.files), "hidden": request.hidden}
            await self._do(session, command)
        return pb.PutFilesResponse()

    async def GetFiles(self, request: pb.GetFilesRequest, context: Context) -> pb.GetFilesResponse:  # noqa: N802
        files = {}
        async with mapped(context):
            session = self._table.find(request.session_id)
            command = {"op": "get", "paths": list(request.paths)}
            async for part in self._call(session, command, _FILE_TIMEOUT_S):
                if isinstance(part, Output):
                    name, _, data = part.data.partition(b"\0")
                    files[name.decode("utf-8", "replace")] = data
        return pb.GetFilesResponse(files=files)

    async def PutFile(  # noqa: N802
        self, requests: AsyncIterator[pb.PutFileRequest], context: Context
    ) -> pb.PutFileResponse:
        async with mapped(context):
            first = await anext(aiter(requests), None)
            if first is None or not first.HasField("header"):
                raise RefusedError("the first message of PutFile must be its header")
            return await self._receive(first.header, requests)
        raise AssertionError("errors are raised")

    async def _receive(
        self, header: pb.PutFileHeader, requests: AsyncIterator[pb.PutFileRequest]
    ) -> pb.PutFileResponse:
        session = self._find(header)
        digest, size = hashlib.sha256(), 0
        piece: dict[str, Any] = {
            "op": "put_piece",
            "path": unescaped(header.path),
            "name": f".put-{uuid.uuid4().hex}",
            "mode": None,
        }
        try:
            async for request in requests:
                if request.WhichOneof("part") == "sha256":
                    if request.sha256 != digest.hexdigest():
                        raise RefusedError(
                            f"{header.path} has digest {digest.hexdigest()}, not {request.sha256}"
                        )
                    mode = header.mode & 0o777 or 0o644
                    await self._do(session, {**piece, "data": b"", "mode": mode})
                    return pb.PutFileResponse(size_bytes=size, sha256=digest.hexdigest())
                digest.update(request.chunk)
                size += len(request.chunk)
                await self._do(session, {**piece, "data": request.chunk})
            raise RefusedError(f"{header.path}: the stream ended without the digest")
        except BaseException:
            if size and session.session_id in self._table.live:
                discard = {"op": "discard", "path": piece["path"], "name": piece["name"]}
                with contextlib.suppress(SandboxLostError, RefusedError):
                    await asyncio.shield(self._do(session, discard))
            raise

    async def GetFile(  # noqa: N802
        self, request: pb.GetFileRequest, context: Context
    ) -> AsyncIterator[pb.GetFileResponse]:
        digest = hashlib.sha256()
        async with mapped(context):
            session = self._table.find(request.session_id)
            command = {"op": "get_pieces", "path": unescaped(request.path)}
            async for part in self._call(session, command, _FILE_TIMEOUT_S):
                if isinstance(part, Output):
                    digest.update(part.data)
                    yield pb.GetFileResponse(chunk=part.data)
        yield pb.GetFileResponse(sha256=digest.hexdigest())

    async def StatFile(self, request: pb.StatFileRequest, context: Context) -> pb.StatFileResponse:  # noqa: N802
        found = pb.FileInfo()
        async with mapped(context):
            session = self._table.find(request.session_id)
            command = {"op": "stat", "path": unescaped(request.path)}
            async for part in self._call(session, command, _FILE_TIMEOUT_S):
                if isinstance(part, Output):
                    found = _file(part.data)
        return pb.StatFileResponse(file=found)

    async def ListFiles(  # noqa: N802
        self, request: pb.ListFilesRequest, context: Context
    ) -> pb.ListFilesResponse:
        answer = pb.ListFilesResponse()
        async with mapped(context):
            session = self._table.find(request.session_id)
            command = {
                "op": "list",
                "path": unescaped(request.path),
                "recursive": request.recursive,
                "limit": min(request.limit or _MAX_ENTRIES, _MAX_ENTRIES),
            }
            async for part in self._call(session, command, _FILE_TIMEOUT_S):
                if isinstance(part, Output):
                    answer.files.append(_file(part.data))
                else:
                    answer.truncated = bool(part.code)
        return answer

    async def RemoveFile(  # noqa: N802
        self, request: pb.RemoveFileRequest, context: Context
    ) -> pb.RemoveFileResponse:
        async with mapped(context):
            await self._do(self._find(request), {"op": "remove", "path": unescaped(request.path)})
        return pb.RemoveFileResponse()

    async def Diff(self, request: pb.DiffRequest, context: Context) -> pb.DiffResponse:  # noqa: N802
        async with mapped(context):
            session = self._table.find(request.session_id)
            below = self._table.find_snapshot(request.snapshot_id).layers
            above = session.stack[: len(session.stack) - len(below)]
            if session.stack[len(above) :] != below:
                raise RefusedError(
                    f"session {session.session_id} does not stand on snapshot {request.snapshot_id}"
                )
            limit = inodes(session.limits.disk_bytes) * len(session.stack)
            found = layers_of.changes(above, below, limit)
            some = await asyncio.to_thread(lambda: list(islice(found, _MAX_ENTRIES + 1)))
        return pb.DiffResponse(
            changes=[
                pb.Change(path=_escaped(path.encode("utf-8", "surrogateescape")), kind=kind)
                for path, kind in some[:_MAX_ENTRIES]
            ],
            truncated=len(some) > _MAX_ENTRIES,
        )

    def _find(self, request: Any) -> Session:
        """The session of a call that changes something; it names the generation that it means."""
        session = self._table.find(request.session_id)
        if request.generation and request.generation != session.generation:
            raise StaleError(
                f"session {session.session_id} is of generation {session.generation}, "
                f"not {request.generation}: it was reset or restored"
            )
        return session

    async def _do(self, session: Session, command: dict[str, Any]) -> None:
        async for _ in self._call(session, command, _FILE_TIMEOUT_S):
            pass

    async def _call(
        self, session: Session, command: dict[str, Any], timeout_s: float
    ) -> AsyncIterator[Output | Exit]:
        session.renew()
        channel = session.channel
        try:
            async for part in channel.request(command, timeout_s=timeout_s):
                yield part
        except SandboxLostError as error:
            cause = await self._table.lost(session, channel)
            raise SandboxLostError(f"the session died ({cause})") from error
        session.renew()


def unescaped(path: str) -> str:
    """A path as the guest takes it, from one as ``FileInfo`` has it."""
    raw = re.sub(
        rb"\\x([0-9a-f]{2})", lambda m: bytes([int(m[1], 16)]), path.encode("utf-8", "replace")
    )
    return raw.decode("utf-8", "surrogateescape")


def _escaped(raw: bytes) -> str:
    def odd(match: re.Match[bytes]) -> bytes:
        try:
            if match[0] != b"\\":
                match[0].decode("utf-8")
                return match[0]
        except UnicodeDecodeError:
            pass
        return b"".join(b"\\x%02x" % byte for byte in match[0])

    return _ODD.sub(odd, raw).decode("utf-8")


def _file(line: bytes) -> pb.FileInfo:
    mode, size, modified, names = line.split(b" ", 3)
    path, _, target = names.partition(b"\0")
    return pb.FileInfo(
        path=_escaped(path),
        kind=_KINDS.get(stat.S_IFMT(int(mode)), "device"),
        size_bytes=int(size),
        mode=stat.S_IMODE(int(mode)),
        modified_s=float(modified),
        target=_escaped(target),
    )


@contextlib.asynccontextmanager
async def mapped(context: Context) -> AsyncIterator[None]:
    """Our errors as gRPC statuses."""
    try:
        yield
    except (RefusedError, ConfigError, ContractError) as error:
        await abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(error), "REFUSED")
    except StaleError as error:
        await abort(context, grpc.StatusCode.FAILED_PRECONDITION, str(error), "STALE_GENERATION")
    except SandboxLostError as error:
        reason = "SANDBOX_OOM" if "(oom)" in str(error) else "SANDBOX_LOST"
        await abort(context, grpc.StatusCode.NOT_FOUND, str(error), reason)
    except InfraError as error:
        await abort(context, grpc.StatusCode.UNAVAILABLE, str(error), "UNAVAILABLE")


async def abort(context: Context, code: grpc.StatusCode, message: str, reason: str) -> NoReturn:
    """End the call with a status that carries one ErrorInfo."""
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN))
    status = status_pb2.Status(code=code.value[0], message=message, details=[detail])
    metadata = (("grpc-status-details-bin", status.SerializeToString()),)
    await context.abort(code, message, metadata)
    raise AssertionError("abort raises")
