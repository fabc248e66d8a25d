"""The session table against a backend in memory: places, promises, leases, the pool."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import pytest

from rollstream.config.model import SandboxesConfig
from rollstream.errors import InfraError, SandboxLostError
from rollstream.v1 import events_pb2
from sandboxes.backends.base import Backend, Isolation, SessionLimits
from sandboxes.channel import Channel
from sandboxes.layers import Layer
from sandboxes.sessions import SessionTable

SPEC = events_pb2.SandboxSpec(toolchain="python")


class FakeChannel:
    def __init__(self) -> None:
        self.alive = True
        self.disk = None
        self.group = None

    async def open(self, *, timeout_s: float) -> None:
        if not self.alive:
            raise SandboxLostError("the session died")

    async def close(self) -> None:
        self.alive = False


class FakeBackend(Backend):
    name = "memory"

    def __init__(self) -> None:
        self.made: list[FakeChannel] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.failures = 0

    async def start(self) -> Isolation:
        return Isolation(tier="none")

    @property
    def toolchains(self) -> tuple[str, ...]:
        return ("python",)

    async def create(
        self, toolchain: str, limits: SessionLimits, below: Sequence[Layer] = ()
    ) -> Channel:
        await self.gate.wait()
        if self.failures:
            self.failures -= 1
            raise InfraError("no")
        self.made.append(FakeChannel())
        return cast(Channel, self.made[-1])

    async def stop(self) -> None:
        return None


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
async def table(backend: FakeBackend) -> AsyncIterator[SessionTable]:
    table = SessionTable(SandboxesConfig(max_sessions=2, pool={}), backend)
    table.start()
    yield table
    await table.stop()
    assert not any(channel.alive for channel in backend.made)


async def acquire(table: SessionTable, request_id: str = "") -> Any:
    return await table.acquire(SPEC, request_id=request_id, lease_s=60)


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_waiters_are_served_in_order(table: SessionTable) -> None:
    first, _ = [await acquire(table) for _ in range(2)]
    order: list[int] = []

    async def wait(number: int) -> None:
        session = await acquire(table)
        order.append(number)
        await table.release(session.session_id)

    waiting = [asyncio.create_task(wait(n)) for n in range(5)]
    await settled()
    assert order == []
    await table.release(first.session_id)
    await asyncio.gather(*waiting)
    assert order == [0, 1, 2, 3, 4]


async def test_places_survive_cancelled_and_failed_calls(
    table: SessionTable, backend: FakeBackend
) -> None:
    for _ in range(5):
        backend.gate.clear()
        call = asyncio.create_task(acquire(table))
        await settled()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        backend.gate.set()
        backend.failures = 1
        with pytest.raises(InfraError):
            await acquire(table)
    assert len({(await acquire(table)).session_id for _ in range(2)}) == 2


async def test_same_request_same_session(table: SessionTable, backend: FakeBackend) -> None:
    backend.gate.clear()
    calls = [asyncio.create_task(acquire(table, "r")) for _ in range(3)]
    await settled()
    backend.gate.set()
    ids = {(await call).session_id for call in calls}
    assert len(ids) == 1
    assert len(backend.made) == 1


async def test_request_outlives_the_call_that_made_it(
    table: SessionTable, backend: FakeBackend
) -> None:
    backend.gate.clear()
    first = asyncio.create_task(acquire(table, "r"))
    await settled()
    second = asyncio.create_task(acquire(table, "r"))
    await settled()
    first.cancel()
    await settled()
    backend.gate.set()
    assert (await second).session_id in table.live


async def test_forgotten_request_leaves_no_session(table: SessionTable) -> None:
    await acquire(table, "r")
    await table.forget("r")
    await table.forget("never seen")
    assert table.live == {}


async def test_gone_session_is_lost_and_ending_it_twice_is_no_error(table: SessionTable) -> None:
    session = await acquire(table)
    await table.release(session.session_id)
    await table.release(session.session_id)
    with pytest.raises(SandboxLostError, match=session.session_id):
        table.find(session.session_id)


async def test_pool_hands_out_only_the_living(backend: FakeBackend) -> None:
    table = SessionTable(SandboxesConfig(max_sessions=4, pool={"python": 2}), backend)
    table.start()
    await settled()
    assert table.ready == {"python": 2}
    backend.made[0].alive = False
    session = await acquire(table)
    assert cast(Any, session.channel) is backend.made[1]
    async with asyncio.timeout(10):
        while table.ready != {"python": 2}:
            await asyncio.sleep(0.001)
    await table.stop()
