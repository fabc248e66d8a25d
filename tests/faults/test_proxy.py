"""The proxy of the fault suite forwards, cuts and stalls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.faults.proxy import Proxy


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with Proxy("127.0.0.1", server.sockets[0].getsockname()[1]) as between:
        yield between
    server.close()


async def test_a_cut_drops_refuses_and_ends(proxy: Proxy) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(b"one")
    assert await reader.readexactly(3) == b"one"
    cut = asyncio.create_task(proxy.cut(0.5))
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await reader.readexactly(1)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.close()
    await cut
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(b"two")
    assert await reader.readexactly(3) == b"two"
    writer.close()


async def test_a_stall_holds_back_and_loses_nothing(proxy: Proxy) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    stall = asyncio.create_task(proxy.stall(0.5))
    await asyncio.sleep(0)
    writer.write(b"late")
    answer = asyncio.create_task(reader.readexactly(4))
    await stall
    # Nothing has come while it lasted.
    assert not answer.done()
    assert await answer == b"late"
    writer.close()
