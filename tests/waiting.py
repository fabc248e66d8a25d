"""Waiting for a condition with a deadline, instead of sleeping."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

_EVERY_S = 0.02


async def until(
    condition: Callable[[], object] | Callable[[], Awaitable[object]], *, seconds: float = 30.0
) -> None:
    """Wait until ``condition`` holds; fail after ``seconds``."""
    deadline = time.monotonic() + seconds
    while True:
        found = condition()
        if isinstance(found, Awaitable):
            found = await found
        if found:
            return
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {condition}")
        await asyncio.sleep(_EVERY_S)
