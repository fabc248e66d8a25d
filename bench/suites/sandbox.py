"""Sandbox sessions through the gRPC API of a real executor, native backend."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time

from bench.harness import config_for, free_port
from bench.report import Report
from bench.services import service
from rollstream.v1 import events_pb2
from sandboxes.client import SandboxClient

NAMES = (
    "sandbox.create_cold.p50_ms",
    "sandbox.acquire_warm.p50_ms",
    "sandbox.run_python.p50_ms",
    "sandbox.churn_per_s",
)
N = 200


def run(report: Report) -> None:
    for pool in (0, 16):
        with tempfile.TemporaryDirectory() as folder:
            port = free_port()
            config = config_for(
                "127.0.0.1:1", folder, f"sandboxes.port={port}", f"sandboxes.pool={{python={pool}}}"
            )
            with service("sandboxes", config):
                asyncio.run(_measure(report, f"127.0.0.1:{port}", warm=bool(pool)))


async def _measure(report: Report, target: str, *, warm: bool) -> None:
    spec = events_pb2.SandboxSpec(toolchain="python")
    opened, ran = [], []
    async with SandboxClient([target]) as client:
        for _ in range(N):
            began = time.perf_counter()
            async with client.session(spec) as session:
                opened.append((time.perf_counter() - began) * 1000)
                began = time.perf_counter()
                await session.run_python("print(37*8)")
                ran.append((time.perf_counter() - began) * 1000)
            if warm:
                # The pool is refilled between two acquisitions: what is measured is a ready
                # session.
                await asyncio.sleep(0.02)
        name = "acquire_warm" if warm else "create_cold"
        report.add(f"sandbox.{name}.p50_ms", statistics.median(opened), unit="ms", n=N)
        if warm:
            report.add("sandbox.run_python.p50_ms", statistics.median(ran), unit="ms", n=N)
            report.add("sandbox.churn_per_s", await _churn(client, spec), unit="1/s", n=N)


async def _churn(client: SandboxClient, spec: events_pb2.SandboxSpec) -> float:
    """Create, run, destroy, 16 at a time."""
    places = asyncio.Semaphore(16)

    async def one() -> None:
        async with places, client.session(spec) as session:
            await session.run_python("pass")

    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(N)))
    return N / (time.perf_counter() - began)
