"""Scripts for the scripted engine that fail or take their time, as a test wants it."""

from __future__ import annotations

import asyncio

import numpy as np
import numpy.typing as npt

from bench.scripts import two_calls
from rollouts.engines.base import EngineBrokenError, GenerateRequest


class Switch:
    """What the scripts do now: set by the test."""

    broken = False
    deadly = ""
    open = asyncio.Event()


def breaking(request: GenerateRequest) -> npt.NDArray[np.int32]:
    """Calls the tool twice and answers, unless the engine is broken."""
    if Switch.broken:
        raise EngineBrokenError("the engine broke")
    return two_calls(request)


async def waiting(request: GenerateRequest) -> npt.NDArray[np.int32]:
    """The same, as soon as the test lets it."""
    await Switch.open.wait()
    return two_calls(request)


def deadly(request: GenerateRequest) -> npt.NDArray[np.int32]:
    """The same, but one rollout breaks the engine whenever it comes."""
    if request.session == Switch.deadly:
        raise EngineBrokenError("the engine broke")
    return two_calls(request)
