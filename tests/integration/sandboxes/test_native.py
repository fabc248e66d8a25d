"""The fork server: what it makes for somebody who is gone must not stay."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import psutil
import pytest

from sandboxes.backends.base import SessionLimits
from sandboxes.backends.native import NativeBackend
from sandboxes.testing import wait_until

LIMITS = SessionLimits(
    memory_bytes=256 << 20, pids=32, disk_bytes=1 << 20, wall_s=5.0, output_bytes=1 << 16
)


@pytest.fixture
async def backend() -> AsyncIterator[NativeBackend]:
    backend = NativeBackend()
    await backend.start()
    yield backend
    await backend.stop()


def below(backend: NativeBackend) -> list[psutil.Process]:
    """Processes of the zygote: it adopts every session."""
    assert backend._process is not None
    return list(psutil.Process(backend._process.pid).children(recursive=True))


async def test_session_without_an_asker_ends(backend: NativeBackend) -> None:
    for _ in range(10):
        ours, theirs = socket.socketpair()
        ours.close()
        backend._ask(LIMITS, theirs, ())
        theirs.close()
    # Requests are served in order: this one is made after all of those were.
    channel = await backend.create("python", LIMITS)
    await asyncio.to_thread(wait_until, lambda: len(below(backend)) == 1, what="the others ended")
    await channel.close()


async def test_cancelled_creation_leaves_no_process(backend: NativeBackend) -> None:
    for number in range(20):
        creating = asyncio.create_task(backend.create("python", LIMITS))
        await asyncio.sleep(number * 0.0005)
        creating.cancel()
        done = (await asyncio.gather(creating, return_exceptions=True))[0]
        if not isinstance(done, BaseException):
            await done.close()
    await (await backend.create("python", LIMITS)).close()
    await asyncio.to_thread(wait_until, lambda: not below(backend), what="every session ended")


async def test_dead_zygote_is_replaced_and_its_sessions_go_on(backend: NativeBackend) -> None:
    before = await backend.create("python", LIMITS)
    assert backend._process is not None
    first = backend._process
    first.kill()
    first.wait()
    assert before.alive
    after = await backend.create("python", LIMITS)
    assert backend._process is not first
    for channel in (before, after):
        async for _ in channel.request({"op": "ping"}, timeout_s=5):
            pass
        await channel.close()
        assert not channel.alive
