"""The wire contract: frames and attaching, input and signals, files in pieces, the same id twice."""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from rollstream.v1 import events_pb2
from rollstream.v1 import sandbox_pb2 as pb
from sandboxes.client import SandboxClient, Session

SPEC = events_pb2.SandboxSpec(toolchain="python")
CAP = 65536


def ask(session: Session, *argv: str, **more: Any) -> pb.ExecRequest:
    return pb.ExecRequest(
        session_id=session.session_id, argv=pb.Argv(values=argv), timeout_s=15, **more
    )


def kinds(frames: list[pb.ExecResponse]) -> list[str]:
    return [str(frame.WhichOneof("frame")) for frame in frames]


async def rest(call: Any) -> list[pb.ExecResponse]:
    """What is still to come of a call that was read from."""
    frames = []
    while (frame := await call.read()) is not grpc.aio.EOF:
        frames.append(frame)
    return frames


def info(error: grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo:
    """The one ErrorInfo that a status carries."""
    raw = dict(error.trailing_metadata())["grpc-status-details-bin"]
    status = status_pb2.Status.FromString(raw)
    assert status.message == error.details() and len(status.details) == 1
    found = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(found)
    assert found.domain == "rollstream.sandboxes"
    return found


async def test_frames_are_numbered_from_started_to_exited(session: Session, stub: Any) -> None:
    frames = [f async for f in stub.Exec(ask(session, "sh", "-c", "echo a; echo b >&2; exit 3"))]
    assert [f.seq for f in frames] == list(range(len(frames)))
    assert kinds(frames)[0] == "started" and kinds(frames)[-1] == "exited"
    assert set(kinds(frames)[1:-1]) == {"stdout", "stderr"}
    end = frames[-1].exited
    assert (end.code, end.reason, end.signal) == (3, "exited", 0)


async def test_signal_and_usage_are_told(session: Session, stub: Any) -> None:
    burn = "i=0; while [ $i -lt 60000 ]; do i=$((i+1)); done; kill -9 $$"
    *_, last = [f async for f in stub.Exec(ask(session, "sh", "-c", burn))]
    assert (last.exited.code, last.exited.signal, last.exited.reason) == (-9, 9, "signalled")
    assert last.exited.cpu_s > 0 and last.exited.max_rss_bytes > 0


async def test_second_command_is_not_charged_for_the_first(session: Session) -> None:
    await session.run_python("sum(range(20_000_000))")
    stub = session._executor.stub
    *_, last = [f async for f in stub.Exec(ask(session, "true"))]
    assert last.exited.cpu_s < 0.3


async def test_flood_keeps_its_head_and_its_tail(session: Session, stub: Any) -> None:
    code = "print('first'); print('x' * 1_000_000); print('last')"
    request = pb.ExecRequest(session_id=session.session_id, python=code, timeout_s=15)
    frames = [f async for f in stub.Exec(request)]
    out = b"".join(f.stdout for f in frames)
    assert out.startswith(b"first\n") and out.endswith(b"last\n") and len(out) == CAP
    (cut,) = [f.truncated for f in frames if f.HasField("truncated")]
    assert (cut.stream, cut.dropped_bytes) == ("stdout", 1_000_012 - CAP)
    assert frames[-1].exited.dropped_bytes == cut.dropped_bytes


async def test_command_with_an_id_outlives_its_call_and_is_attached_to(
    session: Session, stub: Any
) -> None:
    request = ask(session, "sh", "-c", "echo one; read x; echo $x", request_id=uuid.uuid4().hex,
                  keep_stdin_open=True)  # fmt: skip
    call = stub.Exec(request)
    started = await call.read()
    assert (await call.read()).stdout == b"one\n"
    call.cancel()
    process = started.started.process_id
    where = {"session_id": session.session_id, "process_id": process}
    await stub.WriteStdin(pb.WriteStdinRequest(**where, data=b"two\n", eof=True))
    attached = [r.frame async for r in stub.Attach(pb.AttachRequest(**where, from_seq=1))]
    assert attached[0].seq == 1 and attached[0].stdout == b"one\n"
    assert b"".join(f.stdout for f in attached) == b"one\ntwo\n"
    assert attached[-1].exited.code == 0
    # The same id again: the same command, and it does not run a second time.
    again = [f async for f in stub.Exec(request)]
    assert again[0].started.process_id == process and again[1:] == attached


async def test_command_without_an_id_ends_with_its_call(session: Session, stub: Any) -> None:
    call = stub.Exec(ask(session, "sh", "-c", "echo on; sleep 600"))
    await call.read()
    assert (await call.read()).stdout == b"on\n"
    call.cancel()
    # The session is well, and nobody had to wait for the sleeper's deadline.
    result = await session.exec(["echo", "well"])
    assert result.stdout == b"well\n"


async def test_signal_reaches_the_command(session: Session, stub: Any) -> None:
    call = stub.Exec(
        ask(
            session,
            "sh",
            "-c",
            "trap 'echo got; exit 7' TERM; echo up; while :; do sleep 0.05; done",
        )
    )
    process = (await call.read()).started.process_id
    assert (await call.read()).stdout == b"up\n"
    await stub.Signal(
        pb.SignalRequest(session_id=session.session_id, process_id=process, signal=15)
    )
    frames = await rest(call)
    assert b"".join(f.stdout for f in frames) == b"got\n"
    assert frames[-1].exited.code == 7


async def test_input_that_nobody_reads_is_refused_in_the_end(session: Session, stub: Any) -> None:
    call = stub.Exec(ask(session, "sleep", "600", keep_stdin_open=True))
    where = {"session_id": session.session_id, "process_id": (await call.read()).started.process_id}
    data = bytes(1 << 20)
    await stub.WriteStdin(pb.WriteStdinRequest(**where, data=data))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.WriteStdin(pb.WriteStdinRequest(**where, data=data + b"x"))
    assert info(refused.value).reason == "REFUSED"
    await stub.Signal(pb.SignalRequest(**where, signal=9))
    assert (await rest(call))[-1].exited.signal == 9


async def test_errors_carry_one_error_info(stub: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as gone:
        await stub.Get(pb.GetRequest(session_id="none"))
    assert gone.value.code() is grpc.StatusCode.NOT_FOUND
    assert info(gone.value).reason == "SANDBOX_LOST"


async def test_get_tells_about_a_session(session: Session, stub: Any) -> None:
    await session.exec(["true"])
    found = (await stub.Get(pb.GetRequest(session_id=session.session_id))).session
    assert (found.toolchain, found.commands, found.generation) == ("python", 1, 1)
    said = await stub.Capacity(pb.CapacityRequest())
    assert said.free_sessions == said.max_sessions - said.live_sessions
    assert [(t.toolchain, t.target) for t in said.toolchains] == [("python", 2)]


# ------------------------------------------------------------------------------------------ files


async def parts(session: Session, path: str, data: bytes, digest: str) -> AsyncIterator[Any]:
    yield pb.PutFileRequest(
        header=pb.PutFileHeader(session_id=session.session_id, path=path, mode=0o700)
    )
    for start in range(0, len(data), 300_000):
        yield pb.PutFileRequest(chunk=data[start : start + 300_000])
    if digest:
        yield pb.PutFileRequest(sha256=digest)


async def test_file_in_pieces_round_trips_with_its_digest(session: Session, stub: Any) -> None:
    data = bytes(range(256)) * 4000
    digest = hashlib.sha256(data).hexdigest()
    put = await stub.PutFile(parts(session, "in/big", data, digest))
    assert (put.size_bytes, put.sha256) == (len(data), digest)
    got = [
        r
        async for r in stub.GetFile(pb.GetFileRequest(session_id=session.session_id, path="in/big"))
    ]
    assert b"".join(r.chunk for r in got) == data and got[-1].sha256 == digest
    stat = (
        await stub.StatFile(pb.StatFileRequest(session_id=session.session_id, path="in/big"))
    ).file
    assert (stat.kind, stat.size_bytes, stat.mode) == ("file", len(data), 0o700)


@pytest.mark.parametrize("digest", ["", "0" * 64])
async def test_file_without_its_digest_never_appears(
    session: Session, stub: Any, digest: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="digest"):
        await stub.PutFile(parts(session, "in/big", b"x" * 400_000, digest))
    listed = await stub.ListFiles(
        pb.ListFilesRequest(session_id=session.session_id, recursive=True)
    )
    assert [f.path for f in listed.files] == ["in"]


async def test_listing_tells_every_kind_and_odd_names(session: Session, stub: Any) -> None:
    plant = """
import os
os.mkdir("d"); open(b"d/\\xff\\n\\\\", "w").write("odd"); os.symlink("/etc/passwd", "l"); os.mkfifo("p"); open("f", "w").write("1")
"""
    assert (await session.run_python(plant)).exit_code == 0
    listed = await stub.ListFiles(
        pb.ListFilesRequest(session_id=session.session_id, recursive=True)
    )
    found = {f.path: (f.kind, f.target) for f in listed.files}
    odd = "d/\\xff\n\\x5c"
    assert found == {
        "d": ("folder", ""), odd: ("file", ""), "f": ("file", ""), "l": ("link", "/etc/passwd"), "p": ("fifo", ""),
    }  # fmt: skip
    got = [
        r async for r in stub.GetFile(pb.GetFileRequest(session_id=session.session_id, path=odd))
    ]
    assert got[0].chunk == b"odd"
    some = await stub.ListFiles(pb.ListFilesRequest(session_id=session.session_id, limit=2))
    assert (len(some.files), some.truncated) == (2, True)


@pytest.mark.parametrize("path", ["l/passwd", "l", "p", "missing", "../x", "/etc/passwd"])
async def test_only_files_of_the_session_are_read(session: Session, stub: Any, path: str) -> None:
    plant = "import os; os.symlink('/etc', 'l'); os.mkfifo('p'); print(os.path.exists('l/passwd'))"
    assert (await session.run_python(plant)).stdout == b"True\n"
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        [r async for r in stub.GetFile(pb.GetFileRequest(session_id=session.session_id, path=path))]
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_removal_takes_the_tree_and_not_what_links_lead_to(
    session: Session, stub: Any
) -> None:
    await session.put_files({"keep/me": b"x", "t/a/b/c": b"x"})
    assert (await session.exec(["ln", "-s", "/work/keep", "t/a/l"])).exit_code == 0
    for _ in range(2):
        await stub.RemoveFile(pb.RemoveFileRequest(session_id=session.session_id, path="t"))
    listed = await stub.ListFiles(
        pb.ListFilesRequest(session_id=session.session_id, recursive=True)
    )
    assert [f.path for f in listed.files] == ["keep", "keep/me"]


async def test_hidden_files_replace_what_was_planted(session: Session) -> None:
    plant = """
import os
os.mkdir("verify.py"); open("verify.py/trap", "w"); os.symlink("/tmp", "checks"); print("planted", os.path.isdir("checks"))
"""
    assert (await session.run_python(plant)).stdout == b"planted True\n"
    held = asyncio.create_task(
        session.exec(["sh", "-c", "sleep 600; echo late >> verify.py"], timeout_s=15)
    )
    while not (
        await session._executor.stub.Get(pb.GetRequest(session_id=session.session_id))
    ).session.process_id:
        await asyncio.sleep(0.01)
    await session.put_files(
        {"verify.py": b"print('true verifier')", "checks/data": b"1"}, hidden=True
    )
    assert (await held).exit_code == -9
    check = "import os; exec(open('verify.py').read()); print(os.path.islink('checks'), open('checks/data').read())"
    assert (await session.run_python(check)).stdout == b"true verifier\nFalse 1\n"


async def test_snapshots_are_refused_by_name_where_there_are_none(
    session: Session, missing: tuple[str, ...], stub: Any
) -> None:
    request = pb.SnapshotRequest(session_id=session.session_id)
    if any("snapshots" in name for name in missing) or session.tier == "none":
        with pytest.raises(grpc.aio.AioRpcError, match="no snapshots with the backend"):
            await stub.Snapshot(request)
    else:
        assert (await stub.Snapshot(request)).layers == 1


async def test_reset_goes_back_to_how_it_was_made(client: SandboxClient) -> None:
    spec = events_pb2.SandboxSpec(toolchain="python", files={"given": b"1"})
    async with client.session(spec) as session:
        before = session.generation
        await session.run_python("import os; os.unlink('given'); open('mess', 'w')")
        stub = session._executor.stub
        request = pb.ResetRequest(
            request_id="r" + session.session_id, session_id=session.session_id, generation=before
        )
        answers = [(await stub.Reset(request)).generation for _ in range(2)]
        assert answers == [before + 1] * 2
        with pytest.raises(grpc.aio.AioRpcError) as stale:
            await stub.Reset(pb.ResetRequest(session_id=session.session_id, generation=before))
        assert stale.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert info(stale.value).reason == "STALE_GENERATION"
        session.generation = answers[0]
        assert (await session.exec(["ls"])).stdout == b"given\n"
