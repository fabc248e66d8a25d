"""Attacks that go on until something stops them. Each first proves that it ran; after each the session
is healthy or gone, a sibling is untouched, and no process, group, mount or file is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from rollstream.errors import SandboxLostError
from rollstream.v1 import events_pb2
from rollstream.v1 import sandbox_pb2 as pb
from sandboxes.client import SandboxClient, Session
from sandboxes.testing import Executor, wait_until
from tests.contract.sandboxes.test_isolation import well

SPEC = events_pb2.SandboxSpec(toolchain="python")


def around(running: Executor) -> tuple[int, int, list[str], str]:
    """What of an executor the machine sees: processes, groups, files, mounts of the host."""
    mounts = Path(f"/proc/{running.process.pid}/mountinfo").read_text("utf-8")
    return len(running.descendants()), len(running.groups()), running.leftovers(), mounts


@pytest.fixture(autouse=True)
async def nothing_is_left(running: Executor, client: SandboxClient) -> AsyncIterator[None]:
    await pool_is_full(client)
    before = around(running)
    async with client.session(SPEC) as sibling:
        await sibling.put_files({"mine": b"untouched"})
        yield
        assert dict(await sibling.get_files(["mine"])) == {"mine": b"untouched"}
        await well(sibling)
    await asyncio.to_thread(
        wait_until, lambda: around(running) == before, what="everything is gone", deadline_s=20
    )


@pytest.fixture
async def target(client: SandboxClient, nothing_is_left: None) -> AsyncIterator[Session]:
    """The session that is attacked from inside; it ends before what is left is counted."""
    async with client.session(SPEC) as session:
        yield session


async def pool_is_full(client: SandboxClient) -> None:
    stub = client._executors[0].stub
    end = time.monotonic() + 20
    while any(t.ready < t.target for t in (await stub.Capacity(pb.CapacityRequest())).toolchains):
        assert time.monotonic() < end, "the pool does not fill"
        await asyncio.sleep(0.02)


async def healthy_or_gone(session: Session) -> None:
    with contextlib.suppress(SandboxLostError):
        await well(session)


async def test_memory_over_many_processes(target: Session, missing: tuple[str, ...]) -> None:
    hogs = """
import os
open("began", "w").close()
for _ in range(30):
    try: pid = os.fork()
    except OSError: break
    if pid == 0:
        kept = []
        while True: kept.append(bytearray(b"x" * (4 << 20)))
os.wait(); print("a hog ended", flush=True)
while True: os.wait()
"""
    began = time.monotonic()
    try:
        result = await target.run_python(hogs, timeout_s=10)
    except SandboxLostError as error:
        assert "oom" in str(error)
        return
    if not any("memory" in name for name in missing):
        assert result.reason in {"oom", "signalled", "exited"}, result
        assert time.monotonic() - began < 9, "the hogs fought each other until the deadline"
    else:
        assert result.reason == "oom", result
    await healthy_or_gone(target)


async def test_memory_hog_is_told_by_its_reason(
    target: Session, missing: tuple[str, ...], stub: Any
) -> None:
    if any("memory" in name for name in missing):
        return  # said so, in every answer to Create
    code = (
        "print('hog', flush=True)\nkept = []\nwhile True: kept.append(bytearray(b'x' * (4 << 20)))"
    )
    request = pb.ExecRequest(session_id=target.session_id, python=code, timeout_s=15)
    frames = [f async for f in stub.Exec(request)]
    assert b"".join(f.stdout for f in frames) == b"hog\n"
    end = frames[-1].exited
    assert (end.reason, end.signal, list(end.limits_hit)) == ("oom", 9, ["memory"])
    await well(target)


async def test_refused_processes_are_told(
    target: Session, missing: tuple[str, ...], stub: Any
) -> None:
    if any("process limit" in name for name in missing):
        return
    code = """
import os, time
made = 0
while True:
    if os.fork() == 0: time.sleep(600)
    made += 1; open("made", "w").write(str(made))
"""
    request = pb.ExecRequest(session_id=target.session_id, python=code, timeout_s=15)
    end = [f async for f in stub.Exec(request)][-1].exited
    assert int((await target.get_files(["made"]))["made"]) > 10
    assert (end.code, end.reason, list(end.limits_hit)) == (1, "pids", ["pids"])
    await well(target)


async def test_one_gibibyte_of_output(target: Session) -> None:
    code = "import os\nfor _ in range(16384): os.write(1, bytes(65536))\nos._exit(5)"
    result = await target.run_python(code, timeout_s=20)
    assert result.dropped_bytes + len(result.stdout) == 1 << 30
    assert (result.exit_code, len(result.stdout)) == (5, 65536)
    await well(target)


async def test_many_tiny_writes(target: Session) -> None:
    code = "import os\nfor _ in range(200_000): os.write(2, b'x')"
    result = await target.run_python(code, timeout_s=20)
    assert len(result.stderr) + result.dropped_bytes == 200_000
    await well(target)


async def test_very_deep_folder(target: Session, stub: Any) -> None:
    code = """
import os
made = 0
for _ in range(5000):
    try: os.mkdir("d"); os.chdir("d"); made += 1
    except OSError: break
print(made)
"""
    result = await target.run_python(code)
    assert int(result.stdout) > 1000, result.stderr
    listed = await stub.ListFiles(pb.ListFilesRequest(session_id=target.session_id, recursive=True))
    assert listed.truncated and len(listed.files) > 100
    await stub.RemoveFile(pb.RemoveFileRequest(session_id=target.session_id, path="d"))
    assert not (await stub.ListFiles(pb.ListFilesRequest(session_id=target.session_id))).files
    await well(target)


async def test_many_files_are_listed_up_to_a_bound(target: Session, stub: Any) -> None:
    code = """
made = 0
try:
    for made in range(100_000): open("%d" % made, "w").close()
except OSError: pass
print(made)
"""
    result = await target.run_python(code, timeout_s=20)
    made = int(result.stdout)
    assert made > 1000
    listed = await stub.ListFiles(pb.ListFilesRequest(session_id=target.session_id))
    assert len(listed.files) == min(made + 1, 10_000) or len(listed.files) == made
    await well(target)


async def test_abstract_sockets_of_the_host(target: Session) -> None:
    name = f"\0rollstream-test-{id(target)}"
    with socket.socket(socket.AF_UNIX) as ear, socket.socket(socket.AF_UNIX) as mouth:
        ear.bind(name)
        ear.listen()
        mouth.connect(name)
        code = f"""
import errno, socket
try: socket.socket(socket.AF_UNIX).connect({name!r}); print("REACHED")
except OSError as error: print(errno.errorcode[error.errno])
print([line for line in open("/proc/net/unix") if "rollstream" in line])
"""
        assert (await target.run_python(code)).stdout == b"ECONNREFUSED\n[]\n"


async def test_score_of_pid_1_and_kernel_switches_cannot_be_written(target: Session) -> None:
    code = """
import errno, os
open("/proc/self/comm", "w").write("mine"); open("/proc/self/oom_score_adj", "w").write("1000"); print("own")
for path in ("/proc/1/oom_score_adj", "/proc/1/comm", "/proc/1/timerslack_ns", "/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern"):
    try: os.write(os.open(path, os.O_WRONLY), b"1000"); print("WROTE", path)
    except OSError as error: print(errno.errorcode[error.errno])
"""
    own, *refused = (await target.run_python(code)).stdout.split()
    assert own == b"own" and len(refused) == 5
    # The device under the switch takes what is written, and nothing comes of it.
    assert b"WROTE" not in refused, refused


async def test_calls_of_other_architectures_and_of_the_future(target: Session) -> None:
    code = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
print(libc.syscall(39) > 1)
for number in (0x40000000 + 39, 457, 458, 471, 999):
    print(errno.errorcode[ctypes.get_errno()] if libc.syscall(number, 0, 0, 0) < 0 else "DONE")
"""
    result = await target.run_python(code)
    assert result.stdout.split() == [b"True", b"EPERM", *[b"ENOSYS"] * 4], result.stderr


async def test_terminal_input_cannot_be_pushed(target: Session) -> None:
    code = """
import errno, fcntl, os, pty
lead, follow = pty.openpty() if os.path.exists("/dev/ptmx") else (0, 0)
try: fcntl.ioctl(follow, 0x5412, b"x"); print("PUSHED")
except OSError as error: print(errno.errorcode[error.errno])
"""
    assert (await target.run_python(code)).stdout == b"EPERM\n"


@pytest.mark.parametrize("bomb", ["fork", "memory", "output"])
async def test_destroyed_in_the_middle_of_an_attack(client: SandboxClient, bomb: str) -> None:
    code = {
        "fork": "import os\nwhile True:\n try: os.fork()\n except OSError: pass",
        "memory": "kept = []\nwhile True: kept.append(bytearray(b'x' * 65536))",
        "output": "import os\nwhile True: os.write(1, bytes(65536))",
    }[bomb]
    proof = "print('began', flush=True)\n"
    call: Any = None
    async with client.session(SPEC) as session:
        stub = session._executor.stub
        request = pb.ExecRequest(session_id=session.session_id, python=proof + code, timeout_s=15)
        call = stub.Exec(request)
        assert (await call.read()).HasField("started")
        assert (await call.read()).stdout.startswith(b"began")
        began = time.monotonic()
    assert time.monotonic() - began < 5
    with contextlib.suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass


async def test_fork_bomb_does_not_overrun_its_deadline(target: Session) -> None:
    code = (
        "import os\nopen('began', 'w').close()\nwhile True:\n try: os.fork()\n except OSError: pass"
    )
    result = await target.run_python(code, timeout_s=1)
    assert dict(await target.get_files(["began"])) == {"began": b""}
    assert result.reason == "timeout"
    assert 1 <= result.wall_s < 3
    await well(target)
