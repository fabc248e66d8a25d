"""``rollstream sandboxes`` and what ``doctor`` says, against a real executor."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

from rollstream.v1 import events_pb2
from rollstream.v1 import sandbox_pb2 as pb
from sandboxes.client import SandboxClient
from sandboxes.testing import executor

SPEC = events_pb2.SandboxSpec(toolchain="python")


def rollstream(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rollstream", "sandboxes", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


async def test_sessions_are_listed_reached_read_and_ended() -> None:
    with executor(["sandboxes.backend=native", "sandboxes.pool={python=1}"]) as running:
        target = ("--target", running.target)
        async with SandboxClient([running.target]) as client, client.session(SPEC) as session:
            short = session.session_id[:8]
            listed = await asyncio.to_thread(rollstream, "ls", *target)
            assert short in listed.stdout and "1 live" in listed.stdout, listed.stderr
            done = await asyncio.to_thread(
                rollstream,
                "exec",
                *target,
                short,
                "--",
                "sh",
                "-c",
                "echo out; echo err >&2; exit 3",
            )
            assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "err\n")
            idle = await asyncio.to_thread(rollstream, "logs", *target, short)
            assert idle.returncode and "nothing runs" in idle.stderr
            request = pb.ExecRequest(
                session_id=session.session_id,
                argv=pb.Argv(values=["sh", "-c", "echo early; read line"]),
                keep_stdin_open=True,
                timeout_s=20,
            )
            call = session._executor.stub.Exec(request)
            process = (await call.read()).started.process_id
            reading = asyncio.create_task(asyncio.to_thread(rollstream, "logs", *target, short))
            await call.read()
            await session._executor.stub.WriteStdin(
                pb.WriteStdinRequest(session_id=session.session_id, process_id=process, eof=True)
            ) if (await asyncio.wait([reading], timeout=3)) else None
            assert (await reading).stdout == "early\n"
            ended = await asyncio.to_thread(rollstream, "kill", *target, short)
            assert ended.stdout == f"ended {session.session_id}\n", ended.stderr
            again = await asyncio.to_thread(rollstream, "kill", *target, short)
            assert again.returncode and "0 sessions begin with" in again.stderr


def test_an_executor_that_is_not_there_is_named() -> None:
    done = rollstream("ls", "--target", "127.0.0.1:1")
    assert done.returncode and "127.0.0.1:1 does not answer" in done.stderr


def test_probe_proves_each_backend() -> None:
    command = [sys.executable, "-m", "sandboxes.probe"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    found = {a["backend"]: a for a in map(json.loads, done.stdout.splitlines())}
    assert set(found) == {"native", "bubblewrap"}
    assert {a["tier"] for a in found.values()} == {"ns"}, found
