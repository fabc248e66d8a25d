"""Snapshots as layers: generations, forks, what is removed in between, and the way to another executor."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest

from rollstream.errors import ContractError
from rollstream.v1 import events_pb2
from rollstream.v1 import sandbox_pb2 as pb
from sandboxes.client import SandboxClient, Session
from sandboxes.testing import Executor, executor
from tests.contract.sandboxes.conftest import LIMITS

SPEC = events_pb2.SandboxSpec(toolchain="python")
# Prints everything about a tree that must survive: kinds, modes, contents, links, times, attributes.
TREE = """
import os
for top in ("/work", "/tmp"):
    for here, folders, files in os.walk(top):
        folders.sort()
        for name in sorted(folders + files):
            path = os.path.join(here, name); s = os.lstat(path)
            data = os.readlink(path) if os.path.islink(path) else open(path).read() if os.path.isfile(path) else ""
            times = "" if os.path.isdir(path) else int(s.st_mtime)
            print(path, oct(s.st_mode), s.st_nlink if os.path.isfile(path) else "", repr(data), times,
                  [(a, os.getxattr(path, a)) for a in sorted(os.listxattr(path, follow_symlinks=False))])
"""
MAKE = """
import os
os.makedirs("d/e"); open("d/e/f", "w").write("deep"); open("a", "w").write("one"); os.link("a", "b")
os.symlink("/etc/passwd", "l"); os.chmod("a", 0o640); os.setxattr("a", "user.k", b"v"); os.utime("a", (1e9, 1e9))
os.mkdir("gone"); open("gone/x", "w").write("x"); os.mkfifo("p"); open("/tmp/scratch", "w").write("t")
"""
CHANGE = """
import os, shutil
shutil.rmtree("gone"); os.mkdir("gone"); open("gone/new", "w").write("n"); os.unlink("l"); open("d/e/f", "a").write("er")
open("added", "w").write("+"); os.unlink("/tmp/scratch")
"""


async def tree(session: Session) -> bytes:
    result = await session.run_python(TREE)
    assert result.exit_code == 0 and result.stdout, result.stderr
    return result.stdout


async def test_three_generations_go_back_and_forth(client: SandboxClient) -> None:
    async with client.session(SPEC) as session:
        trees, snapshots = [], []
        for code in (MAKE, CHANGE, "open('third', 'w').write('3')"):
            assert (await session.run_python(code)).exit_code == 0
            trees.append(await tree(session))
            snapshots.append(await session.snapshot())
            # The session goes on over its snapshot, as if nothing had been.
            assert await tree(session) == trees[-1]
        assert len(set(trees)) == 3
        await session.run_python("open('failed step', 'w')")
        for number in (2, 0, 1, 0):
            await session.restore(snapshots[number])
            assert await tree(session) == trees[number]
        assert session.generation == 5


async def test_a_failed_step_is_rolled_back_and_tried_again(client: SandboxClient) -> None:
    async with client.session(SPEC) as session:
        await session.put_files({"state": b"good"})
        good = await session.snapshot()
        await session.exec(["rm", "-rf", "/work", "/tmp"])
        assert dict(await session.get_files(["state"])) == {}
        await session.restore(good)
        assert (await session.exec(["cat", "state"])).stdout == b"good"


async def test_forks_diverge_and_outlive_their_parent(client: SandboxClient) -> None:
    import contextlib

    async with contextlib.AsyncExitStack() as held:
        async with client.session(SPEC) as parent:
            await parent.run_python(MAKE)
            snapshot = await parent.snapshot()
            forks = [
                await held.enter_async_context(client.session(SPEC, fork=(parent, snapshot)))
                for _ in range(8)
            ]
            await parent.run_python("open('a', 'w').write('parent')")
        for number, fork in enumerate(forks):
            assert (await fork.exec(["cat", "b", "d/e/f"])).stdout == b"onedeep"
            await fork.run_python(f"open('a', 'w').write('{number}'); open('own{number}', 'w')")
        for number, fork in enumerate(forks):
            listed = (await fork.exec(["sh", "-c", "cat a; ls own*"])).stdout
            assert listed == b"%down%d\n" % (number, number)
        stub = forks[0]._executor.stub
        await stub.DropSnapshot(pb.DropSnapshotRequest(snapshot_id=snapshot))
        assert (await forks[0].exec(["cat", "d/e/f"])).stdout == b"deep"
        with pytest.raises(ContractError, match="no snapshot"):
            await forks[0].restore(snapshot)


async def test_diff_tells_what_changed_since(client: SandboxClient) -> None:
    async with client.session(SPEC) as session:
        await session.run_python(MAKE)
        first = await session.snapshot()
        stub = session._executor.stub
        request = pb.DiffRequest(session_id=session.session_id, snapshot_id=first)
        assert not (await stub.Diff(request)).changes
        await session.run_python(CHANGE)
        await session.snapshot()
        await session.run_python("open('later', 'w')")
        changes = {c.path: c.kind for c in (await stub.Diff(request)).changes}
        assert changes == {
            "added": "added", "later": "added", "gone/new": "added", "gone/x": "removed",
            "l": "removed", "d/e/f": "changed",
        }  # fmt: skip


async def test_many_snapshots_are_flattened(client: SandboxClient) -> None:
    async with client.session(SPEC) as session:
        layers = 0
        for number in range(20):
            await session.run_python(f"open('f{number}', 'w').write('{number}')")
            request = pb.SnapshotRequest(session_id=session.session_id)
            layers = (await session._executor.stub.Snapshot(request)).layers
        assert layers < 17
        listed = await session.exec(["sh", "-c", "cat f*"])
        assert sorted(listed.stdout) == sorted("".join(map(str, range(20))).encode())


async def test_session_keeps_its_limits_and_isolation_over_a_snapshot(
    client: SandboxClient,
) -> None:
    async with client.session(SPEC) as session:
        await session.snapshot()
        code = """
import errno, os
try:
    for number in range(64): open("hog%d" % number, "wb").write(bytes(1 << 20))
except OSError as error: print(errno.errorcode[error.errno])
print(sorted(p for p in os.listdir("/proc") if p.isdigit()) == ["1", str(os.getpid())], os.listdir("/run/layers/0"))
try: os.mkdir("/run/layers/0/x")
except OSError as error: print(errno.errorcode[error.errno])
"""
        lines = (await session.run_python(code)).stdout.split()
        assert lines[0] == b"ENOSPC" and lines[1:] == [b"True", b"[]", b"EROFS"]


async def test_exported_snapshot_is_restored_on_another_executor(
    client: SandboxClient, running: Executor
) -> None:
    blobs = f'blob.uri="{running.folder / "run" / "blobs"}"'
    async with client.session(SPEC) as session:
        await session.run_python(MAKE)
        await session.snapshot()
        await session.run_python(CHANGE)
        last = await session.snapshot()
        expected = await tree(session)
        blob = await session.export(last)
        # The same tree is the same blob.
        assert await session.export(last) == blob
    with executor([*LIMITS, "sandboxes.backend=native", blobs]) as other:
        async with (
            SandboxClient([other.target]) as elsewhere,
            elsewhere.session(SPEC, blob=blob) as copy,
        ):
            assert await tree(copy) == expected
            await copy.run_python("open('a', 'a').write('!')")
            await copy.reset()
            assert await tree(copy) == expected


async def test_a_blob_that_is_not_there_is_named(session: Session) -> None:
    stub = session._executor.stub
    wrong = events_pb2.BlobRef(sha256="0" * 64)
    with pytest.raises(grpc.aio.AioRpcError, match=r"blob 0000.*cannot be read") as refused:
        await stub.Create(pb.CreateRequest(spec=SPEC, from_blob=wrong))
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert (await session.exec(["true"])).exit_code == 0
