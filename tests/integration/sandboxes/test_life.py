"""Executors and sessions over their whole life: leases, kills, full houses, wrong settings."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import grpc.aio
import psutil
import pytest

from rollstream.errors import ConfigError, InfraError, SandboxLostError
from rollstream.v1 import events_pb2, sandbox_pb2, sandbox_pb2_grpc
from sandboxes.client import SandboxClient
from sandboxes.testing import Executor, executor, free_port, wait_until

SPEC = events_pb2.SandboxSpec(toolchain="python")
BACKENDS = ("native", "bubblewrap", "process")


def settings(backend: str, *more: str) -> list[str]:
    unsafe = str(backend == "process").lower()
    return [
        f"sandboxes.backend={backend}",
        f"sandboxes.unsafe={unsafe}",
        "sandboxes.pool={}",
        *more,
    ]


async def until(condition: Callable[[], object], *, what: str, deadline_s: float = 15.0) -> None:
    await asyncio.to_thread(wait_until, lambda: bool(condition()), what=what, deadline_s=deadline_s)


def live(running: Executor) -> list[str]:
    with grpc.insecure_channel(running.target) as channel:
        stub = sandbox_pb2_grpc.SandboxServiceStub(channel)
        return [s.session_id for s in stub.List(sandbox_pb2.ListRequest(), timeout=10).sessions]


@pytest.fixture
async def raw() -> AsyncIterator[Callable[[Executor], sandbox_pb2_grpc.SandboxServiceStub]]:
    """A bare stub, for what the client does not let happen."""
    channels: list[grpc.aio.Channel] = []

    def connect(running: Executor) -> sandbox_pb2_grpc.SandboxServiceStub:
        channels.append(grpc.aio.insecure_channel(running.target))
        return sandbox_pb2_grpc.SandboxServiceStub(channels[-1])

    yield connect
    for channel in channels:
        await channel.close()


@pytest.mark.parametrize("backend", BACKENDS)
async def test_kill_of_the_executor_leaves_no_process(backend: str) -> None:
    with executor(settings(backend)) as running:
        async with (
            SandboxClient([running.target], budget_s=5) as client,
            client.session(SPEC) as one,
            client.session(SPEC) as other,
        ):
            await other.exec(["true"])
            code = "open('began', 'w'); print('on', flush=True); import time; time.sleep(600)"
            busy = asyncio.create_task(one.run_python(code))
            # Two sessions and a command: what must be gone afterwards was there before.
            await until(lambda: len(running.descendants()) >= 3, what="a command runs")
            below = running.descendants()
            running.kill()
            with pytest.raises(SandboxLostError):
                await busy
            with pytest.raises(SandboxLostError):
                await other.exec(["true"])
        await until(lambda: not alive(below), what="every process is gone")


@pytest.mark.parametrize("backend", BACKENDS)
async def test_next_executor_clears_what_a_killed_one_left(backend: str, tmp_path: Path) -> None:
    with executor(settings(backend)) as first:
        first.kill()
        (left,) = first.leftovers()
        environment = {"TMPDIR": str(first.folder / "tmp")}
        with executor(settings(backend), env=environment):
            names = first.leftovers()
            assert left not in names
            assert len(names) == 1
        assert first.leftovers() == []


@pytest.mark.parametrize("backend", BACKENDS)
async def test_drain_ends_sessions_and_leaves_nothing(backend: str) -> None:
    with executor(settings(backend, "sandboxes.pool={python=2}")) as running:
        async with SandboxClient([running.target]) as client, client.session(SPEC) as session:
            await session.exec(["true"])
            below = running.descendants()
            assert below
            assert await asyncio.to_thread(running.terminate) == 0
        await until(lambda: not alive(below), what="every process is gone")
        assert running.leftovers() == []


async def test_vanished_client_loses_its_session(raw: Callable[..., object]) -> None:
    with executor(settings("native")) as running:
        stub = raw(running)
        request = sandbox_pb2.CreateRequest(spec=SPEC, lease_s=0.5)
        session = await stub.Create(request, timeout=20)  # type: ignore[attr-defined]
        assert live(running) == [session.session_id]
        await until(lambda: not live(running), what="the lease runs out")


async def test_lease_is_renewed_while_the_client_lives() -> None:
    with executor(settings("native")) as running:
        async with (
            SandboxClient([running.target], lease_s=1.0) as client,
            client.session(SPEC) as session,
        ):
            # Long enough for the lease to run out three times.
            await session.exec(["sleep", "1.5"])
            end = time.monotonic() + 2
            await until(lambda: time.monotonic() > end, what="two leases have passed")
            assert (await session.exec(["echo", "here"])).stdout == b"here\n"


async def test_full_house_makes_callers_wait_and_then_says_so(raw: Callable[..., object]) -> None:
    with executor(settings("native", "sandboxes.max_sessions=1")) as running:
        stub = raw(running)
        async with SandboxClient([running.target]) as client:
            async with client.session(SPEC):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await stub.Create(  # type: ignore[attr-defined]
                        sandbox_pb2.CreateRequest(spec=SPEC), timeout=1.0
                    )
                assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                waiting = asyncio.create_task(echo(client))
            assert await waiting == b"mine\n"


async def echo(client: SandboxClient) -> bytes:
    async with client.session(SPEC) as session:
        return (await session.exec(["echo", "mine"])).stdout


async def test_cancelled_callers_leak_no_session() -> None:
    with executor(settings("native")) as running:
        async with SandboxClient([running.target], lease_s=600) as client:
            for number in range(40):
                call = asyncio.create_task(echo(client))
                await asyncio.sleep(number * 0.0005)
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)
            assert await echo(client) == b"mine\n"
            await until(lambda: not live(running), what="every session is ended")


async def test_client_tries_the_next_executor(tmp_path: Path) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    with executor(settings("native")) as running:
        async with SandboxClient([nobody, running.target]) as client:
            assert [await echo(client) for _ in range(4)] == [b"mine\n"] * 4


async def test_no_executor_names_targets_and_remedy() -> None:
    nobody = f"127.0.0.1:{free_port()}"
    async with SandboxClient([nobody], budget_s=1.0) as client:
        with pytest.raises(InfraError, match=rf"{nobody}.*sandbox_targets"):
            async with client.session(SPEC):
                pass
    with pytest.raises(ConfigError, match="sandbox_targets"):
        SandboxClient([])


def start_alone(tmp_path: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    words = [w for o in (f'run.dir="{tmp_path}"', *overrides) for w in ("--set", o)]
    command = [sys.executable, "-m", "sandboxes.main", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        done = start_alone(tmp_path, f"sandboxes.port={port}")
    assert done.returncode == 2
    assert f"sandboxes.port {port}" in done.stderr
    assert "another port" in done.stderr


def test_no_isolation_must_be_asked_for(tmp_path: Path) -> None:
    done = start_alone(tmp_path, "sandboxes.backend=process")
    assert done.returncode == 2
    assert "sandboxes.unsafe=true" in done.stderr


def alive(processes: list[psutil.Process]) -> list[int]:
    """Those that still run; a recycled pid is another process."""
    return [p.pid for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
