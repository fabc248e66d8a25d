"""Sandbox sessions through the gRPC API of a real executor, native backend, beside controls.

Each figure is measured in turns with its controls (a plain subprocess, bubblewrap per command), so
that what the machine does besides falls on both: on a busy machine read the ratios. Needs about
3 GiB of memory for the thousand sessions that live together.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

from bench.report import Report
from rollstream.v1 import events_pb2
from rollstream.v1 import sandbox_pb2 as pb
from sandboxes.backends.bubblewrap import _find_bwrap
from sandboxes.client import SandboxClient, Session
from sandboxes.testing import Executor, executor

NAMES = (
    "sandbox.create_cold.p50_ms",
    "sandbox.create_cold.p99_ms",
    "sandbox.create_cold_user.p50_ms",
    "sandbox.acquire_warm.p50_ms",
    "sandbox.acquire_warm.p99_ms",
    "sandbox.run_python.p50_ms",
    "sandbox.exec_true.p50_ms",
    "sandbox.exec_true.p99_ms",
    "sandbox.exec_per_s.live1000",
    "sandbox.idle_per_gib",
    "sandbox.live_1000_gib",
    "sandbox.churn_per_s",
    "sandbox.snapshot_1000_files.p50_ms",
    "sandbox.reset.p50_ms",
    "sandbox.teardown_1000_s",
    "sandbox.deadline_overrun.p50_ms",
    "sandbox.control.subprocess.p50_ms",
    "sandbox.control.bwrap.p50_ms",
    "sandbox.control.rpc.p50_ms",
)
N = 200
LIVE = 1000
SPEC = events_pb2.SandboxSpec(toolchain="python")
# Kernel memory that sessions take and that belongs to no process.
_KERNEL = ("Slab", "KernelStack", "PageTables", "Percpu")


class Times:
    """Milliseconds by name, taken in turns."""

    def __init__(self) -> None:
        self._ms: dict[str, list[float]] = {}

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._ms.setdefault(name, []).append((time.perf_counter() - began) * 1000)

    def report(self, report: Report, *, p99: tuple[str, ...] = ()) -> None:
        for name, values in self._ms.items():
            report.add(
                f"sandbox.{name}.p50_ms", statistics.median(values), unit="ms", n=len(values)
            )
            if name in p99:
                worst = sorted(values)[int(len(values) * 0.99)]
                report.add(f"sandbox.{name}.p99_ms", worst, unit="ms", n=len(values))


def run(report: Report) -> None:
    with executor(["sandboxes.pool={}", f"sandboxes.max_sessions={LIVE + 50}"]) as running:
        asyncio.run(_cold(report, running))
        asyncio.run(_churn(report, running))
        asyncio.run(_files(report, running))
        asyncio.run(_thousand(report, running))
    with executor(["sandboxes.pool={python=16}"]) as running:
        asyncio.run(_warm(report, running))
    with executor(["sandboxes.pool={}"], ordinary_user=True) as running:
        asyncio.run(_cold_user(report, running))


async def _cold(report: Report, running: Executor) -> None:
    times = Times()
    bwrap = [str(_find_bwrap()), "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "true"]
    async with SandboxClient([running.target]) as client:
        stub = client._executors[0].stub
        for _ in range(N):
            with times.of("control.subprocess"):
                subprocess.run(["true"], check=True)  # noqa: ASYNC221 - nothing else runs
            with times.of("control.bwrap"):
                subprocess.run(bwrap, check=True)  # noqa: ASYNC221
            with times.of("control.rpc"):
                await stub.RenewLease(pb.RenewLeaseRequest())
            opening = client.session(SPEC)
            with times.of("create_cold"):
                session = await opening.__aenter__()
            with times.of("run_python"):
                await session.run_python("print(37*8)")
            await opening.__aexit__(None, None, None)
    times.report(report, p99=("create_cold",))


async def _cold_user(report: Report, running: Executor) -> None:
    times = Times()
    async with SandboxClient([running.target]) as client:
        for _ in range(N):
            opening = client.session(SPEC)
            with times.of("create_cold_user"):
                await opening.__aenter__()
            await opening.__aexit__(None, None, None)
    times.report(report)


async def _warm(report: Report, running: Executor) -> None:
    times = Times()
    async with SandboxClient([running.target]) as client:
        stub = client._executors[0].stub
        for _ in range(N):
            while (await stub.Capacity(pb.CapacityRequest())).toolchains[0].ready < 16:
                await asyncio.sleep(0.005)
            opening = client.session(SPEC)
            with times.of("acquire_warm"):
                await opening.__aenter__()
            await opening.__aexit__(None, None, None)
    times.report(report, p99=("acquire_warm",))


async def _churn(report: Report, running: Executor) -> None:
    """Create, run, destroy, 16 at a time."""

    async def one(client: SandboxClient) -> None:
        async with client.session(SPEC) as session:
            await session.exec(["true"])

    async with SandboxClient([running.target]) as client:
        rate = await _rate([lambda: one(client)] * N, at_once=16)
    report.add("sandbox.churn_per_s", rate, unit="1/s", n=N)


async def _files(report: Report, running: Executor) -> None:
    times = Times()
    make = "for n in range(1000): open('f%d' % n, 'wb').write(bytes(1024))"
    async with SandboxClient([running.target]) as client:
        for _ in range(N // 10):
            async with client.session(SPEC) as session:
                for _ in range(10):
                    await session.run_python(make)
                    with times.of("snapshot_1000_files"):
                        await session.snapshot()
                await session.run_python(make)
                for _ in range(10):
                    with times.of("reset"):
                        await session.reset()
                    await session.run_python(make)
        async with client.session(SPEC) as session:
            for _ in range(20):
                ended = await session.exec(["sleep", "600"], timeout_s=0.2)
                assert ended.reason == "timeout"
                overrun = (ended.wall_s - 0.2) * 1000
                times._ms.setdefault("deadline_overrun", []).append(overrun)
    times.report(report)


async def _thousand(report: Report, running: Executor) -> None:
    times = Times()
    before = _memory(running)
    async with (
        SandboxClient([running.target], budget_s=120) as client,
        AsyncExitStack() as held,
    ):
        sessions: list[Session] = []
        gate = asyncio.Semaphore(8)

        async def open_one() -> None:
            async with gate:
                sessions.append(await held.enter_async_context(client.session(SPEC)))

        await asyncio.gather(*(open_one() for _ in range(LIVE)))
        used = _memory(running) - before
        report.add("sandbox.idle_per_gib", LIVE / (used / 2**30), unit="1/GiB", n=LIVE)
        report.add("sandbox.live_1000_gib", used / 2**30, unit="GiB", n=LIVE)
        for session in sessions[:N]:
            with times.of("exec_true"):
                await session.exec(["true"])
        work = [lambda s=session: s.exec(["true"]) for session in sessions]
        rate = await _rate(work, at_once=16)
        report.add("sandbox.exec_per_s.live1000", rate, unit="1/s", n=LIVE)
        stub = client._executors[0].stub
        ids = [session.session_id for session in sessions]
        ends = [lambda i=i: stub.Destroy(pb.DestroyRequest(session_id=i)) for i in ids]
        rate = await _rate(ends, at_once=16)
        report.add("sandbox.teardown_1000_s", LIVE / rate, unit="s", n=LIVE)
    times.report(report, p99=("exec_true",))


async def _rate(work: list[Callable[[], Awaitable[object]]], *, at_once: int) -> float:
    places = asyncio.Semaphore(at_once)

    async def one(act: Callable[[], Awaitable[object]]) -> None:
        async with places:
            await act()

    began = time.perf_counter()
    await asyncio.gather(*(one(act) for act in work))
    return len(work) / (time.perf_counter() - began)


def _memory(running: Executor) -> int:
    """Bytes of the executor with all its sessions: proportional shares, and the kernel's."""
    total = 0
    for pid in (running.process.pid, *(p.pid for p in running.descendants())):
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text("ascii").splitlines()
        except OSError:
            continue
        total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) << 10
    for line in Path("/proc/meminfo").read_text("ascii").splitlines():
        name, _, value = line.partition(":")
        if name in _KERNEL:
            total += int(value.split()[0]) << 10
    return total
